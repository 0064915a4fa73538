"""Tables of both devices. Shapes, peers and columns differ; inputs, calls and judges are one."""
