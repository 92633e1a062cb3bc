"""The suite that needs a GPU: `make test-gpu`. Skipped, with the driver's reason, where there is none."""
