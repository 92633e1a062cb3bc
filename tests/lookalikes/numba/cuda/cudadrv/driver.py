class NumbaCUDAMemoryManager:
    interface_version = 1

    def __init__(self, *, context):
        pass
