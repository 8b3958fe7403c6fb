//! Slot of a command: its memory, and what it waits for.

use tenmil_base::{Instant, RegionId, Segment};
use tenmil_wire::Command;

use super::DataDirection;
use super::fused_commands::FusedHalf;
use crate::tcp::buffer_pool::{Buffer, BufferPool};

/// Command in its slot.
#[derive(Debug)]
pub(super) struct CommandSlot {
    pub(super) command: Command,
    /// Its memory, set by [`set_buffer`](Self::set_buffer).
    pub(super) buffer: Option<Buffer>,
    /// The first `len_bytes` of the buffer; empty if there is none, or it is shorter. In
    /// [`CommandState::CompletedInPlace`], a segment of the medium.
    pub(super) data: Segment,
    pub(super) len_bytes: u32,
    pub(super) direction: DataDirection,
    pub(super) state: CommandState,
    pub(super) received_at: Instant,
    /// When its data were requested from the host.
    pub(super) requested_at: Instant,
    /// Number of consecutive checks at which its response was unsent while other connections waited
    /// for memory.
    pub(super) stalled_checks: u8,
    /// Whether its data arrive in the capsule. Set only for halves of fused pairs.
    pub(super) is_in_capsule: bool,
    /// Whether the rate limits have been applied to it. Set only while there are any.
    pub(super) has_passed_limits: bool,
}

/// State of a command: what it waits for. Only this state decides how the command proceeds; the
/// host's fields are evaluated once, when the command is received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommandState {
    Free,
    /// Ready to execute, or executing.
    Ready,
    /// Completed; the response is queued.
    Completed,
    /// Completed; the response is queued, and its data are sent from the medium's memory.
    CompletedInPlace,
    /// Completed while its data are still being received; the response follows the data.
    Draining,
    /// Waits for a rate limit.
    AwaitingLimit,
    /// Waits for a buffer.
    AwaitingBuffer,
    /// Its data are being received.
    AwaitingData,
    /// Half of a fused pair that has not started.
    Half(FusedHalf),
}

impl CommandSlot {
    pub(super) const FREE: Self = Self {
        command: Command([0; 8]),
        buffer: None,
        data: Segment { region: RegionId(0), offset: 0, len_bytes: 0 },
        len_bytes: 0,
        direction: DataDirection::None,
        state: CommandState::Free,
        received_at: Instant::NEVER,
        requested_at: Instant::NEVER,
        stalled_checks: 0,
        is_in_capsule: false,
        has_passed_limits: false,
    };

    /// Sets the buffer of the command.
    #[inline]
    pub(super) fn set_buffer(&mut self, buffer: Buffer, pool: &BufferPool) {
        self.data = buffer.segment(pool, self.len_bytes).unwrap_or_default();
        self.buffer = Some(buffer);
    }

    /// Leaks the buffer. Returns its length in bytes.
    pub(super) fn leak_buffer(&mut self) -> u64 {
        let Some(buffer) = self.buffer.take() else { return 0 };
        let len_bytes = buffer.len_bytes();
        buffer.leak_block();
        len_bytes
    }
}

impl CommandState {
    /// Whether a response is queued, or follows the data that are being received.
    pub(super) fn has_response(self) -> bool {
        matches!(self, Self::Completed | Self::CompletedInPlace | Self::Draining)
    }

    /// Whether data are outstanding, requested by an R2T or in the capsule.
    #[inline]
    pub(super) fn awaits_host_data(self) -> bool {
        match self {
            Self::AwaitingData | Self::Draining => true,
            Self::Half(half) => half.is_awaiting_data(),
            Self::Free
            | Self::Ready
            | Self::Completed
            | Self::CompletedInPlace
            | Self::AwaitingLimit
            | Self::AwaitingBuffer => false,
        }
    }
}
