//! NVMe bytes to meaning and back.
