"""Known last words of engines, as tables, for people who do not read tracebacks.

The first row that matches wins, so causes stand before their consequences ("Engine core initialization failed" is
always last and never the cause). Texts are those of vLLM 0.32, SGLang 0.5 and llama.cpp b10068 to b11434.
"""

from __future__ import annotations

from llmgw.node.engines.causes import Row

PORT_IN_USE = Row.of(
    "port-in-use",
    r"Address already in use|couldn't bind HTTP server socket|Port is already in use"
    r"|port (?:at )?\d+ is (?:already in use|in use|not available)(?!.*(?:aiting for|rying port))|EADDRINUSE",
    "a port that the engine wanted was taken",
    "give the agent a range of ports that nothing else uses",
)

#: CUDA's error 802, on machines with NVSwitches alone.
FABRIC = Row.of(
    "fabric-manager",
    r"system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY|[Ee]rror 802\b",
    "CUDA is not ready (error 802): the NVLink fabric of this machine was not started",
    "systemctl restart nvidia-fabricmanager, of the same version as the driver; `llmgw-node doctor` shows its state",
)

#: Of the dynamic loader and of Python: the program is there, a library of the system's is not.
MISSING_LIBRARY = Row.of(
    "missing-library",
    r"error while loading shared libraries:|ImportError: lib\S+\.so\S*: cannot open shared object file",
    "a shared library that the engine needs is not on this machine",
    "install the package it belongs to, as the line names it (libgomp.so.1 is libgomp1 on Debian and Ubuntu)",
)

_MORE_MEMORY = "use more or larger GPUs, a smaller context, or a quantised model"

#: Of PyTorch, CUDA, NCCL and gloo, so of vLLM and SGLang alike.
TORCH = (
    MISSING_LIBRARY,
    PORT_IN_USE,
    FABRIC,
    Row.of(
        "out-of-memory",
        r"CUDA out of memory|torch\.OutOfMemoryError|cuda.*out of memory|CUDA_ERROR_OUT_OF_MEMORY",
        "the GPU's memory did not suffice",
        _MORE_MEMORY,
    ),
    Row.of(
        "gpu-unsupported",
        r"no kernel image is available for execution on the device",
        "this build of the engine has no code for this GPU's architecture",
        "install a build for its compute capability",
    ),
    Row.of(
        "driver-too-old",
        r"CUDA driver version is insufficient|driver on your system is too old",
        "the GPU driver is older than what the engine was built for",
        "upgrade the driver or use an older engine",
    ),
    Row.of(
        "gpu-missing",
        r"No CUDA GPUs are available|no CUDA-capable device is detected|Failed to infer device type",
        "the engine sees no GPU",
        "check the driver with `llmgw-node doctor`, and that the GPU is healthy",
    ),
    Row.of(
        "gpu-fault",
        r"CUDA error: (?:an illegal|unspecified|uncorrectable|device-side)|\bXid\b",
        "the GPU reported an error while computing",
        "look at the node's problems; reset or drain the GPU if it repeats",
    ),
    Row.of(
        "no-interface",
        r"Unable to find (?:interface|address for)|no socket interface found|Bootstrap : no socket interface",
        "the network interface named for NCCL or gloo does not exist here",
        "check NCCL_SOCKET_IFNAME (a list of prefixes) and GLOO_SOCKET_IFNAME (one exact name)",
    ),
    Row.of(
        "peer-missing",
        r"Timed out after \d+ seconds waiting for clients|\d+/\d+ clients joined|connectFullMesh failed|DistStoreError"
        r"|client socket has (?:timed out|failed to connect)|Rendezvous(?:Timeout|Connection)Error",
        "the other members of the replica did not come, or cannot be reached",
        "check that all members started, that the ports between nodes are open, and that GLOO_SOCKET_IFNAME names the "
        "interface which the nodes share",
    ),
    Row.of(
        "nccl-version",
        r"Mismatched NCCL version|NCCL version mismatch",
        "the members run different versions of NCCL",
        "install the same version of the engine on all of them",
    ),
    Row.of(
        "rdma-retries",
        r"NET/IB ?: ?Got completion .*with (?:status=|error )12\b|RETRY_EXC_ERR",
        "over RDMA a member never answered: it died, or the two ports cannot reach each other",
        "look whether another member ended first; else measure the ports with `llmgw ctl fabric-test` (a cable in the "
        "wrong rail, a link that flaps, or on RoCE a GID of another subnet)",
    ),
    Row.of(
        "rdma-failed",
        r"NET/IB ?: ?Got completion .*with (?:status=|error )\d+|NET/IB ?: ?Got async event",
        "a transfer over RDMA failed",
        "look at the problems of the node's ports, and measure them with `llmgw ctl fabric-test`",
    ),
    Row.of(
        "memlock",
        r"ibv_(?:reg_mr\w*|create_[qc]p\w*).*(?:Cannot allocate memory|error 12|errno 12)"
        r"|unlimited memlock|ulimit -l",
        "RDMA may not lock the memory that it needs",
        "raise the limit of locked memory to unlimited where the engine runs (LimitMEMLOCK=infinity of its unit)",
    ),
    Row.of(
        "rdma-unreachable",
        r"ibv_modify_qp\w* failed",
        "the RDMA ports of two members cannot be connected",
        "on RoCE both ends need a GID of the same subnet and version: see `llmgw ctl fabric-test`",
    ),
    Row.of(
        "peer-unreachable",
        r"NCCL WARN .*(?:[Cc]onnect\w* to .* failed|No route to host|Connection timed out|Connection refused)",
        "NCCL cannot connect to another member of the replica",
        "check that NCCL_SOCKET_IFNAME names the interface which the nodes share, and that no firewall is between them",
    ),
    Row.of(
        "gpu-twice",
        r"Duplicate GPU detected",
        "two processes of the replica use the same GPU",
        "look whether the profile's env sets CUDA_VISIBLE_DEVICES or --base-gpu-id",
    ),
    Row.of(
        "collective-timeout",
        r"Watchdog caught collective operation timeout",
        "a collective operation between GPUs hung",
        "look for a member that died or a link that is down",
    ),
    Row.of(
        "peer-lost",
        r"ncclRemoteError|remote process exited|NCCL WARN .*(?:closed by remote peer|reset by peer)",
        "another member of the replica went away, or the network between them failed",
        "look at the logs of the other members",
    ),
    Row.of(
        "nccl",
        r"ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclInvalidUsage|NCCL error",
        "NCCL, which carries data between GPUs, failed",
        "set NCCL_DEBUG=INFO in the profile's env and look at the log",
    ),
    Row.of(
        "peer-lost",
        r"[Gg]loo.*Connection (?:closed|reset) by peer|Connection (?:closed|reset) by peer.*gloo",
        "another member of the replica went away",
        "look at the logs of the other members",
    ),
    Row.of(
        "missing-weights",
        r"Cannot find any model weights with|LocalEntryNotFoundError|annot find an appropriate cached snapshot"
        r"|does not appear to have a file named|Repository Not Found|is not a local folder",
        "the model's files are not where the engine looks for them",
        "check the model's source",
    ),
    Row.of(
        "broken-weights",
        r"SafetensorError|HeaderTooLarge|MetadataIncompleteBuffer|Error while deserializing header",
        "a file of the model cannot be read",
        "fetch the model again: a download was probably cut off",
    ),
    Row.of("disk-full", r"No space left on device", "a disk is full", "free space on the node"),
    Row.of(
        "module-missing",
        r"ModuleNotFoundError|ImportError: lib\S+: cannot open shared object",
        "the engine's installation is not complete",
        "install the engine again",
    ),
)

VLLM = (
    Row.of(
        "gpu-memory-taken",
        r"Free memory on device .* on startup is less than desired GPU memory utilization",
        "something else holds memory of this GPU",
        "see who with `llmgw ctl node NAME`, or ask for less memory",
    ),
    Row.of(
        "not-enough-memory",
        r"Available memory on node .* is less than desired CPU memory utilization",
        "the machine's memory that is free is less than what the engine wants for its cache",
        "give the profile `memory`, or --kv-cache-memory-bytes among its arguments",
    ),
    Row.of(
        "context-too-long",
        r"To serve at least one request with the models?'s max seq len",
        "the context does not fit into what memory is left for the cache",
        "lower the context, or give the shard more GPU memory",
    ),
    Row.of(
        "out-of-memory",
        r"No available memory for the cache blocks",
        "the weights leave no memory for the cache",
        _MORE_MEMORY,
    ),
    Row.of(
        "context-too-long",
        r"derived_max_model_len|max_model_len .* is greater than",
        "the context is longer than the model allows",
        "lower the context",
    ),
    Row.of(
        "gpu-unsupported",
        r"Bfloat16 is only supported on GPUs with compute capability",
        "this GPU cannot compute in bfloat16",
        "add --dtype half to the profile's arguments",
    ),
    Row.of(
        "bad-shape",
        r"must be divisible by tensor parallel size|World size \(\d+\) is larger than the number of available GPUs"
        r"|must evenly divide the total world size",
        "the model cannot be split over so many GPUs",
        "choose a number of GPUs that divides the model's attention heads",
    ),
    Row.of(
        "bad-argument",
        r"error: unrecognized arguments|error: argument |vllm: error:|ValidationError",
        "the engine does not accept an argument of the profile",
        "check the profile's arguments against this version of the engine",
    ),
    *TORCH,
    Row.of(
        "worker-died",
        r"Worker proc .* died unexpectedly|EngineDeadError|EngineCore .*died",
        "a worker process of the engine died",
        "the lines before it in the log say why",
    ),
    Row.of(
        "too-slow",
        r"Timed out waiting for engine core processes to start",
        "the engine gave up waiting for its own processes",
        "set VLLM_ENGINE_READY_TIMEOUT_S in the profile's env",
    ),
    Row.of(
        "engine-failed",
        r"Engine core initialization failed",
        "the engine could not start",
        "the lines before it in the log say why",
    ),
)

SGLANG = (
    Row.of(
        "out-of-memory",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "the weights leave no memory for the cache",
        _MORE_MEMORY,
    ),
    Row.of(
        "gpu-memory-taken",
        r"The memory capacity is unbalanced",
        "something else holds memory of one of the GPUs",
        "see who with `llmgw ctl node NAME`",
    ),
    Row.of(
        "context-too-long",
        r"context_length .* is greater than the derived|longer than the model's context length",
        "the context is longer than the model allows",
        "lower the context",
    ),
    Row.of(
        "bad-argument",
        r"error: unrecognized arguments|error: argument |sglang.*: error:",
        "the engine does not accept an argument of the profile",
        "check the profile's arguments against this version of the engine",
    ),
    *TORCH,
    Row.of(
        "stalled",
        r"Watchdog timeout|watchdog_timeout",
        "the engine's own watchdog saw no progress and ended it",
        "look at the GPUs' problems and the log before it",
    ),
    # After any exception of a scheduler SGLang kills its whole tree, itself included: not the kernel's doing.
    Row.of(
        "engine-failed",
        r"Scheduler hit an exception|TokenizerManager hit an exception|DetokenizerManager hit an exception",
        "a process of the engine failed, and the engine killed itself",
        "the exception is in the log",
    ),
)

LLAMACPP = (
    MISSING_LIBRARY,
    PORT_IN_USE,
    FABRIC,
    Row.of(
        "no-interface",
        r"Invalid host address",
        "the rpc-server cannot listen on this member's address",
        "set the node's `address` to an IPv4 address that this machine has",
    ),
    Row.of(
        "port-in-use",
        r"Failed to create server socket",
        "the rpc-server could not listen: its port was taken, or the member's address is not one of this machine",
        "check the node's `address`, and keep the agent's range of ports for engines alone",
    ),
    Row.of(
        "bad-argument",
        r"error: invalid argument|error while handling (?:argument|environment variable)|error: .*unknown argument"
        r"|invalid value for",
        "the engine does not accept an argument of the profile",
        "check the profile's arguments against this version of the engine",
    ),
    Row.of(
        "out-of-memory",
        r"ggml_aligned_malloc: insufficient memory|failed to allocate \S+ buffer|unable to allocate \S+ buffer"
        r"|cudaMalloc failed: out of memory|ErrorOutOfDeviceMemory|failed to allocate (?:compute|KV)|std::bad_alloc"
        r"|alloc_tensor_range: failed",
        "memory did not suffice for the model and its cache",
        "lower the context, ask for more memory, or use a smaller quantisation",
    ),
    Row.of(
        "peer-lost",
        r"Remote RPC server crashed|(?:send|recv) failed \(bytes_",
        "a peer of the replica went away",
        "look at the logs of the other members",
    ),
    Row.of(
        "peer-missing",
        r"Failed to connect to \S+:\d+",
        "a peer of the replica cannot be reached",
        "check that its rpc-server runs and that no firewall is between the nodes",
    ),
    Row.of(
        "engine-version",
        r"RPC .*version mismatch|RPC (?:server|protocol) version",
        "the members run versions of llama.cpp whose RPC differs",
        "install the same version on all nodes",
    ),
    Row.of(
        "model-unsupported",
        r"unknown model architecture|unknown pre-tokenizer|unsupported model",
        "this version of the engine does not know this kind of model",
        "use a newer engine",
    ),
    Row.of(
        "broken-weights",
        r"tensor '.*' data is not within the file bounds|invalid magic|failed to read (?:tensor|magic)"
        r"|gguf_init_from_\w+: |illegal split file|invalid split file|missing split|done_getting_tensors: wrong number",
        "a file of the model is damaged or not complete",
        "fetch the model again: a download was probably cut off",
    ),
    Row.of(
        "missing-weights",
        r"failed to open GGUF|No such file or directory|failed to load GGUF split",
        "the model's files are not where the engine looks for them",
        "check the model's source",
    ),
    Row.of(
        "missing-weights",
        r"failed to load model|exiting due to model loading error",
        "the engine could not load the model",
        "check the model's source; the lines before it in the log say why",
    ),
    Row.of(
        "cpu-unsupported",
        r"AMX is not ready to be used",
        "this build of the engine needs instructions that this CPU lacks",
        "use a build for this CPU",
    ),
)
