"""What is known of RDMA, as pure functions over values: no I/O, no clock."""
