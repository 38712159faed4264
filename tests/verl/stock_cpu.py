"""Makes stock verl run on CPU for the tests that compare with it: registry entries only, no patch, no plugin.

Loaded by verl's own `VERL_USE_EXTERNAL_MODULES` in every process. The plugin stays dormant in such a run.
"""

from __future__ import annotations

import torch.distributed
import wrapt

from verl_ext_sharding import platforms, rollout

platforms.register()


def _engines(_module):
    from verl_ext_sharding import engines

    engines.register()


def _process_group(module):
    """verl names the CPU twice in the backend string, which torch refuses: the one thing that no registry can mend."""
    stock = module.initialize_global_process_group_ray

    def initialize(timeout_second=None, backend=None):
        stock(timeout_second, backend or "cpu:gloo")

    module.initialize_global_process_group_ray = initialize


def _say_worker_classes(module):
    stock = module.create_colocated_worker_cls

    def create(class_dict):
        names = {key: cls.cls.__ray_actor_class__.__name__ for key, cls in class_dict.items()}
        print(f"@classes {sorted(names.items())}", flush=True)
        return stock(class_dict)

    module.create_colocated_worker_cls = create


wrapt.register_post_import_hook(_engines, "verl.workers.engine")
wrapt.register_post_import_hook(rollout.register_adapter, rollout.BASE_MODULE)
wrapt.register_post_import_hook(rollout.register_replica, rollout.REPLICA_MODULE)
wrapt.register_post_import_hook(_process_group, "verl.utils.distributed")
wrapt.register_post_import_hook(_say_worker_classes, "verl.trainer.ppo.v1.trainer_base")
assert torch.distributed.is_available()
