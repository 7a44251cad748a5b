# SPDX-License-Identifier: Apache-2.0
"""Every inline PTX instruction of the kernels. The first line of each says on which architectures it is legal."""

from __future__ import annotations

from cute_kernels.dsl.ptx.arithmetic import *
from cute_kernels.dsl.ptx.asynchronous import *
from cute_kernels.dsl.ptx.global_memory import *
from cute_kernels.dsl.ptx.narrow import *
from cute_kernels.dsl.ptx.registers import *
from cute_kernels.dsl.ptx.shared_memory import *
from cute_kernels.dsl.ptx.tensor_copies import *
from cute_kernels.dsl.ptx.tensor_memory import *
