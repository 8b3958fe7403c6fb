//! Reservation commands (Base 2.1 §7.5 to §7.8): the queue moves their data, the controller decides.

use wire::{Command, IoOpcode, Status};

use super::{Event, Step};
use crate::transfer::Direction;

/// A reservation command under way.
#[derive(Debug)]
pub(crate) struct Forwarded {
    len_bytes: u32,
    direction: Direction,
}

impl Forwarded {
    /// What `command` moves; `None` if a report asks for more than `transfer_bytes_max`.
    pub(crate) fn new(
        opcode: IoOpcode,
        command: &Command,
        transfer_bytes_max: u32,
    ) -> Option<Self> {
        let (len_bytes, direction) = match opcode {
            // CRKEY and NRKEY; CRKEY and PRKEY; CRKEY.
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

    pub(super) fn next(&mut self, event: Event, bytes: &[u8]) -> Step {
        let Self { len_bytes, direction } = *self;
        match (event, direction) {
            (Event::Begin, _) => Step::Walk { len_bytes, direction },
            (Event::Walked, Direction::FromHost) => Step::Fetch(len_bytes),
            (Event::Walked, Direction::ToHost) => Step::Forward,
            (Event::Moved { .. }, Direction::FromHost) => Step::Forward,
            (Event::Decided(Status::SUCCESS, _), Direction::ToHost) => {
                let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX).min(len_bytes);
                Step::Return(len)
            }
            (Event::Decided(status, result), _) => Step::End(status, result),
            (Event::Moved { .. }, Direction::ToHost) => Step::OK,
            _ => Step::confused(),
        }
    }
}
