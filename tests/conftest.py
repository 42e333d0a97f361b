"""What every test needs: the CPU, whatever the machine has."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
