//! Reservation commands (Base 2.1 §7.5 to §7.8): the queue moves their data, the controller executes
//! them.

use tenmil_wire::{Command, IoOpcode, Status};

use super::{JobEvent, JobStep};
use crate::data_pointer_walk::Direction;

/// Reservation command in progress.
#[derive(Debug)]
pub(crate) struct ReservationJob {
    len_bytes: u32,
    direction: Direction,
}

impl ReservationJob {
    /// Creates the job of `command`. Returns `None` if a report is longer than `transfer_bytes_max`.
    pub(crate) fn new(
        opcode: IoOpcode,
        command: &Command,
        transfer_bytes_max: u32,
    ) -> Option<Self> {
        let (len_bytes, direction) = match opcode {
            // Register: CRKEY and NRKEY; Acquire: CRKEY and PRKEY; Release: CRKEY.
            IoOpcode::ReservationRelease => (8, Direction::FromHost),
            IoOpcode::ReservationReport => {
                let len = (u64::from(command.cdw10()) + 1) * 4;
                (
                    u32::try_from(len).ok().filter(|len| *len <= transfer_bytes_max)?,
                    Direction::ToHost,
                )
            }
            _ => (16, Direction::FromHost),
        };
        Some(Self { len_bytes, direction })
    }

    pub(super) fn next_step(&mut self, event: JobEvent, bytes: &[u8]) -> JobStep {
        let Self { len_bytes, direction } = *self;
        match (event, direction) {
            (JobEvent::Begin, _) => JobStep::Walk { len_bytes, direction },
            (JobEvent::Walked, Direction::FromHost) => JobStep::ReadParameters(len_bytes),
            (JobEvent::Walked, Direction::ToHost) => JobStep::Forward,
            (JobEvent::Copied { .. }, Direction::FromHost) => JobStep::Forward,
            (JobEvent::ControllerCompleted(Status::SUCCESS, _), Direction::ToHost) => {
                let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX).min(len_bytes);
                JobStep::WriteResult(len)
            }
            (JobEvent::ControllerCompleted(status, result), _) => JobStep::End(status, result),
            (JobEvent::Copied { .. }, Direction::ToHost) => JobStep::OK,
            _ => JobStep::unexpected_event(),
        }
    }
}
