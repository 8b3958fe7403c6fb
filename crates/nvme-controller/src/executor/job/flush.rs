//! Flush of every namespace: NSID FFFFFFFFh (Base 2.1 §7.2).

use tenmil_wire::Status;

use super::{JobEvent, JobStep};

/// Flush of every namespace in progress.
#[derive(Debug, Default)]
pub(crate) struct FlushAllJob {
    /// First failure; the remaining namespaces are flushed nevertheless.
    failure: Option<Status>,
}

impl FlushAllJob {
    pub(super) fn next_step(&mut self, event: JobEvent) -> JobStep {
        match event {
            JobEvent::Begin => JobStep::FlushFrom(0),
            JobEvent::Flushed(Some((channel, status))) => {
                if !status.is_success() {
                    self.failure.get_or_insert(Status(status.0));
                }
                JobStep::FlushFrom(channel.saturating_add(1))
            }
            JobEvent::Flushed(None) => JobStep::rejected(self.failure.unwrap_or(Status::SUCCESS)),
            _ => JobStep::unexpected_event(),
        }
    }
}
