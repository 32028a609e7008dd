"""Settings with which the systems' own libraries run offline and watch nothing by themselves."""

QUIET_COMET = dict.fromkeys(
    (
        "log_code",
        "log_graph",
        "log_git_metadata",
        "log_git_patch",
        "auto_output_logging",
        "log_env_details",
        "parse_args",
    ),
    False,
)
QUIET_WANDB = {"console": "off", "x_disable_stats": True, "silent": True}
