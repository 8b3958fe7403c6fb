//! A user-space NVMe storage stack.
