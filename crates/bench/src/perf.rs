//! The benchmark `perf`: loads devices and reports what they and the driver achieve.
//!
//! ```text
//!   options ──> engine (one thread per core: workload, arrivals, stamp) ──> result ──> report
//!                 └─ progress ──> progress line
//! ```

pub mod arrivals;
pub mod engine;
pub mod environment;
pub mod options;
pub mod progress;
pub mod report;
pub mod result;
pub mod stamp;
pub mod version_map;
pub mod workload;
pub mod zipf;
