//! The benchmark `perf`: loads devices and reports what they and the driver achieve.
//!
//! ```text
//!   options ──> engine (one thread per core: workload, arrivals, stamp) ──> result ──> report
//!                 └─ progress ──> progress line
//! ```

pub mod arrival_times;
pub mod block_stamp;
pub mod engine;
pub mod environment;
pub mod perf_options;
pub mod perf_result;
pub mod progress;
pub mod report;
pub mod version_map;
pub mod workload;
pub mod zipf;
