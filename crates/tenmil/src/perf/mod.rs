//! `perf`: load SSDs and say what they, and the driver, can do.
//!
//! ```text
//!   options ──> engine (one thread per core: workload, arrivals, stamp) ──> outcome ──> report
//!                  └─ progress ──> the live line
//! ```

pub mod arrivals;
pub mod engine;
pub mod environment;
pub mod ledger;
pub mod options;
pub mod outcome;
pub mod progress;
pub mod report;
pub mod stamp;
pub mod workload;
pub mod zipf;
