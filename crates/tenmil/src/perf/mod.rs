//! `perf`: load SSDs and say what they, and the driver, can do.
//!
//! ```text
//!   options ──> engine (one thread per core: workload, arrivals, stamp) ──> outcome ──> report
//!                  └─ progress ──> the live line
//! ```

pub mod environment;
pub mod options;
pub mod outcome;
pub mod quantity;
