"""The adapters of 2025, filled in on a machine with GPUs."""


def get_ddp_individual_parameters(module):
    from cs336_systems.ddp import TimedDDP

    return TimedDDP(module)


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    ddp_model.finish()
