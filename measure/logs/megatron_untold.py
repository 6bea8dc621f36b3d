"""Arguments of Megatron-LM that no column of training.csv tells, each with its harmless values.

`None`, and that the log does not say it, are harmless in any case. The first harmless value is what
a row would be taken for. Names and defaults are those of megatron/training/arguments.py, from
Megatron-Core 0.5 on.
"""

OF_ONE_GRAPH = ("cuda_graph_impl", "enable_cuda_graph")  # or of graphs of layers

_OFF = (
    # layers of another kind
    *("is_hybrid_model", "enable_mhc_connections", "qk_clip"),
    *("attention_output_gate", "quick_geglu"),
    *("fp32_residual_connection", "apply_residual_connection_post_layernorm"),
    # another step than one of pretraining all weights
    *("freeze_all_layers", "perform_rl_step", "sft"),
    # stages of other layers, or another order of their passes
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("standalone_embedding_stage", "overlap_p2p_comm_warmup_flush", "delay_wgrad_compute"),
    "defer_embedding_wgrad_compute",
    # another optimizer, or other bytes of gradients and parameters
    *("optimizer_cpu_offload", "optimizer_cuda_graph", "use_layer_wise_distributed_optimizer"),
    *("grad_reduce_in_bf16", "fp8_param_gather", "ddp_reduce_scatter_with_fp32_accumulation"),
    "overlap_param_gather_with_optimizer_step",
    # other communication of a layer
    *("tp_comm_overlap", "use_sharp", "hybrid_context_parallel"),
    # other memory, and what it takes to save it
    *("cpu_offloading", "fine_grained_activation_offloading", "distribute_saved_activations"),
    # other kernels
    "deterministic_mode",
)
_FP32 = ("torch.float32", "fp32")
UNTOLD: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_OFF, ("False",)),
    **dict.fromkeys((*OF_ONE_GRAPH, "external_cuda_graph"), ("False", "none")),
    "cp_comm_type": ("p2p",),
    "cpu_offloading_num_layers": ("0",),
    "decoder_first_pipeline_num_layers": (),
    "decoder_last_pipeline_num_layers": (),
    "empty_unused_memory_level": ("0",),
    "encoder_pipeline_model_parallel_size": ("0",),
    "encoder_tensor_model_parallel_size": ("0",),
    "exp_avg_dtype": _FP32,
    "exp_avg_sq_dtype": _FP32,
    "experimental_attention_variant": (),
    "fp4": (),
    "fp8": (),
    "gtp_weight_remat_size": ("1",),
    "heterogeneous_layers_config_encoded_json": (),
    "heterogeneous_layers_config_path": (),
    "hierarchical_context_parallel_sizes": (),
    "hybrid_attention_ratio": ("0.0", "0"),
    "hybrid_layer_pattern": (),
    "hybrid_mlp_ratio": ("0.0", "0"),
    "hybrid_override_pattern": (),
    "kitchen_config_file": (),
    "kitchen_recipe_number": (),
    "linear_attention_freq": (),
    "main_grads_dtype": _FP32,
    "main_params_dtype": _FP32,
    "mtp_num_layers": ("0",),
    "no_rope_freq": (),
    "num_distributed_optimizer_instances": ("1",),
    "optimizer": ("adam", "adamw"),
    "outer_dp_sharding_strategy": ("no_shard",),
    "pipeline_model_parallel_layout": (),
    "softmax_type": ("vanilla",),
    "spec": ("None", "['local']", "local"),
    "te_precision_config_file": (),
    "window_size": (),
}
OF_EXPERTS: dict[str, tuple[str, ...]] = {
    "expert_gtp_weight_remat_size": ("1",),
    "moe_expert_capacity_factor": (),
    "moe_extended_tp": ("False",),
    "moe_latent_size": (),
    "moe_layer_freq": ("1",),
    "moe_layer_recompute": ("False",),
    "moe_shared_expert_gate": ("False",),
    "overlap_moe_expert_parallel_comm": ("False",),
}
# what is not Transformer Engine's delayed scaling of all layers' products, which is simulated
OF_FP8: dict[str, tuple[str, ...]] = {
    "first_last_layers_bf16": ("False",),
    "fp8_dot_product_attention": ("False",),
    "fp8_multi_head_attention": ("False",),
    "fp8_output_proj": ("False",),
    "fp8_recipe": ("delayed",),
    "fp8_wgrad": ("True",),
}
# on by default there, and simulated so where Transformer Engine ran a row's layers
FUSED_THERE = {
    "apply_rope_fusion": "its positions are simulated as rotated by what joins queries and keys",
    "bias_swiglu_fusion": "its activations are simulated as one kernel",
    "gradient_accumulation_fusion": "its products are simulated to add weights' gradients up",
}
# switches that change no message and little of a step: said, and simulated otherwise
SIMULATED_AS = {
    "add_qkv_bias": "its queries, keys and values are simulated without a bias of their own",
    "moe_grouped_gemm": "its experts are simulated as one product after another",
    "moe_permute_fusion": "its tokens are simulated as moved by kernels of their own",
    "moe_router_fusion": "its routing is simulated as kernels of their own",
    "moe_shared_expert_overlap": "its shared expert is simulated without overlap with messages",
    **dict.fromkeys(
        ("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"),
        "experts' rows in FP8 are simulated as padded by copies",
    ),
    **dict.fromkeys(
        ("qk_layernorm", "qk_l2_norm"), "its queries and keys are simulated without norms"
    ),
    "squared_relu": "its activation is simulated as GELU",
}
