"""What the plugin offers. Imports no torch."""

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import BackendSpec, Capability, Detection, DeviceSpec, TrackerSpec

DRIVETRAIN_API = 1

MEAN = BackendSpec(
    name="acme-mean",
    summary="averages gradients with one all-reduce",
    target="acme_drivetrain.backend:AcmeBackend",
    options="acme_drivetrain.options:AcmeOptions",
    accepts=("acme_options",),
    exports=("AcmeOptions",),
    capabilities=frozenset(
        {
            Capability.DISTRIBUTED,
            Capability.NO_SYNC,
            Capability.MULTIPLE_MODELS,
            Capability.CLIP_VALUE,
            Capability.ITEM_WEIGHTS,
            Capability.MID_WINDOW_STATE,
        }
    ),
)

TOYCHIP = DeviceSpec(
    name="toychip",
    summary="a chip that computes on the CPU",
    target="acme_drivetrain.device:ToyChip",
    torch_type="cpu",
    communication_backend="gloo",
    priority=-1,  # never chosen by itself
)

LOG = TrackerSpec(
    name="acme-log",
    summary="one text file per run",
    target="acme_drivetrain.tracker:AcmeTracker",
    needs_directory=True,
    kinds=frozenset({"config"}),
)


@hookimpl
def drivetrain_register_backends():
    return [MEAN]


@hookimpl
def drivetrain_detect_backend(request):
    if not request.process.is_distributed or "AcmeOptions" not in request.option_types:
        return None
    return [Detection("acme-mean", 250, "its options were given")]


@hookimpl
def drivetrain_register_devices():
    return [TOYCHIP]


@hookimpl
def drivetrain_register_trackers():
    return [LOG]
