//! A user-space NVMe storage stack.

#![forbid(unsafe_code)]

pub mod perf;
mod refused;
mod uri;

pub use refused::Refused;
pub use uri::{COUNT_MAX, EmuMedium, EmuSpec, MODELS, Uri};
