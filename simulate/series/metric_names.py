"""What the name of a published metric means."""

import re

# Blanks and underscores as blanks. MFU counts a model's FLOPs and HFU recomputed ones.
_S, _GPU, _PER = r"(s|secs?|seconds?)", r"(gpu|device|gcd)s?", r"(/| per )"
_TOKENS, _SAMPLES = r"tok(en)?s?", r"(samples?|seq(uence)?s?)"


def _each(what: str, whose: str) -> str:
    """So many a second and GPU (or node), in either order."""
    return rf"{what}{_PER}({_S}{_PER}{whose}|{whose}{_PER}{_S})\b"


_METRICS = (
    (
        rf"((train )?(step|iteration|iter) tim(e|ing)\b"
        rf"|(time|ms|msecs?|milliseconds?|{_S}){_PER}(step|it|iter|iteration)\b)",
        "step",
    ),
    (rf"(steps?|it(er(ation)?)?s?){_PER}{_S}$", "steps"),
    (rf"(tgs\b|{_each(_TOKENS, _GPU)})", "tokens"),
    (_each(_TOKENS, "node"), "tokens_node"),
    (rf"{_TOKENS}{_PER}({_S}|day)( total)?$", "tokens_total"),
    (_each(_SAMPLES, _GPU), "samples_gpu"),
    (_each(_SAMPLES, "node"), "samples_node"),
    (rf"{_SAMPLES}{_PER}{_S}( total)?$", "samples"),
    (r"(mfu|model flops? utili[sz]ation)\b", "mfu"),
    (r"(hfu|hardware flops? utili[sz]ation)\b", "hfu"),
)
# Names of FLOP/s that count what is computed again; not `excluding recompute`
_COUNTED = r"hardware|\bhw\b|\bhfu\b|recompute\b|\bincl\w*\.?[^,;()]*recomput"
_NOT_COUNTED = (
    r"\b(excl(uding|udes|\.)?|without|w/o|no|not|non)\b((?!\bwith\b)[^,;()])*?recomput\w*"
    r"|recomput\w*\s+(is\s+)?(not\s+(included|counted)|excluded)"
)
UTILISATION = ("mfu", "hfu")
RATES = ("tokens", "tokens_node", "tokens_total", "samples", "samples_gpu", "samples_node")
FLOPS = ("model", "hardware", "model_total", "hardware_total")


def metric_kind(name: str) -> str | None:
    """What a metric's name means: a kind of `_METRICS` or of `FLOPS`."""
    plain = re.sub(r"[\s_]+", " ", name.strip().lower())
    plain = re.sub("tera(?=flop)", "t", re.sub("peta(?=flop)", "p", plain))
    of_all = re.search(r"\b(aggregate|total)\b", plain)
    plain = re.sub(r"^((elapsed|avg\.?|average|mean|median|total|global|aggregate) )+", "", plain)
    if found := re.fullmatch(rf"(?:training )?throughput({_PER}(gpu|node))? [(\[](.*)[)\]]", plain):
        plain = found[4] + (found[1] or "")
    if re.search(r"[(\[](k|m|min|minutes|h|hours|us)[)\]]| (min|minutes|h|hours|us)$", plain):
        return None
    each = re.search(rf"{_PER}{_GPU}\b", plain)
    if each and "aggregate" in name.lower():
        return None
    if re.search("[tp]flop", plain):
        counted = re.sub(_NOT_COUNTED, "", plain)
        kind = "hardware" if re.search(_COUNTED, counted) and "model" not in plain else "model"
        per_s = re.search(r"FLOPS\b", name) or re.search(r"flops?(/| per )s", plain)
        rate = of_all and per_s and "day" not in plain
        return kind if each else f"{kind}_total" if rate else None
    return next((kind for pattern, kind in _METRICS if re.match(pattern, plain)), None)


def metric_unit(name: str, kind: str, value: float) -> float:
    """What a value is to be multiplied with, for seconds, TFLOP/s and shares."""
    plain = name.lower()
    if kind == "step" and re.search(r"(?<![a-z])(ms|msecs?|milliseconds?)(?![a-z])", plain):
        return 1e-3
    if kind == "tokens_total" and re.search(r"\bday", plain):
        return 1 / 86400
    if kind in FLOPS and re.search(r"p(eta)?flop", plain):
        return 1e3
    percent = kind in UTILISATION and ("%" in name or value > 1)
    return 1e-2 if percent else 1.0
