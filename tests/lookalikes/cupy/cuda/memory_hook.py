from __future__ import annotations

_hooks = {}


def get_memory_hooks():
    return _hooks


class MemoryHook:
    name = "MemoryHook"

    def __enter__(self):
        _hooks[self.name] = self
        return self

    def __exit__(self, *_):
        del _hooks[self.name]

    def malloc_preprocess(self, **kwargs):
        pass

    def malloc_postprocess(self, **kwargs):
        pass

    def free_preprocess(self, **kwargs):
        pass

    def free_postprocess(self, **kwargs):
        pass
