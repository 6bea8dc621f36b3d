"""NVIDIA's GPU performance monitoring: hardware counters between two samples, through NVML.

Hopper and later. A reading is the mean since the one before it, so nothing is missed between two
readings, however rare they are.
"""

import math
from typing import Any

MIB = 2**20
# column of telemetry.parquet: (metric of nvml.h, what its unit is worth in the column's)
METRICS = {
    "sm_utilisation_pct": ("NVML_GPM_METRIC_SM_UTIL", 1.0),
    "sm_occupancy_pct": ("NVML_GPM_METRIC_SM_OCCUPANCY", 1.0),
    "tensor_activity_pct": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1.0),
    "dram_bandwidth_pct": ("NVML_GPM_METRIC_DRAM_BW_UTIL", 1.0),
    "nvlink_tx_bytes_per_s": ("NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", MIB),
    "nvlink_rx_bytes_per_s": ("NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", MIB),
    "pcie_tx_bytes_per_s": ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB),
    "pcie_rx_bytes_per_s": ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB),
}


class Gpm:
    """The counters of one GPU. Raises what NVML raises where the GPU has none."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._nvml = nvml
        self._handle = handle
        self._before = nvml.nvmlGpmSampleGet(handle, nvml.nvmlGpmSampleAlloc())
        self._after = nvml.nvmlGpmSampleAlloc()

    def read(self) -> dict[str, float]:
        """Means since the previous reading, by column; what the GPU lacks is left out."""
        nvml = self._nvml
        nvml.nvmlGpmSampleGet(self._handle, self._after)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(METRICS)
        asked.sample1, asked.sample2 = self._before, self._after
        for metric, (name, _) in zip(asked.metrics, METRICS.values(), strict=False):
            metric.metricId = getattr(nvml, name)
        nvml.nvmlGpmMetricsGet(asked)
        self._before, self._after = self._after, self._before
        found = {}
        for metric, (column, (_, factor)) in zip(asked.metrics, METRICS.items(), strict=False):
            if metric.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(metric.value):
                found[column] = float(metric.value) * factor
        return found
