//! Commands beyond requests: whatever the caller has built, and the one fused operation there is.

use core::fmt;

use base::{Dma, Doorbell, Flags, Instant, Operation, Outcome, Request, Segment, Span};
use wire::{Command, Fuse};

use super::{NamespaceQueue, Stretch};
use crate::data_pointer::{Cursor, MemoryRefused};
use crate::link::Order;
use crate::slot::{Mark, tick_of};

/// A command was not submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotSubmitted {
    /// There is no room now.
    Full,
    /// The controller is gone for good.
    Dead,
    /// It cannot be pointed at this memory.
    Memory(MemoryRefused),
    /// It moves more bytes than one command can.
    TooLong {
        /// How many one command can.
        bytes_max: u32,
    },
    /// The request makes no sense, or the controller has no such operation.
    Refused(Outcome),
    /// Half of a fused pair comes only with its other half.
    Fused,
}

/// A fused Compare and Write.
#[derive(Clone, Copy, Debug)]
pub struct CompareAndWrite<'a> {
    /// Which blocks.
    pub blocks: Stretch,
    /// What they must hold.
    pub compare: &'a [Segment],
    /// What they hold afterwards.
    pub write: &'a [Segment],
    /// FUA and limited retry.
    pub flags: Flags,
}

impl<D: Dma, B: Doorbell> NamespaceQueue<D, B> {
    /// Submits a command as the caller has built it, pointed at `data` and `metadata`. Without data
    /// segments its data pointer stays as it is, and so does its metadata pointer without metadata.
    ///
    /// The answer's result is dword 0 of the completion. Reservations go this way, as `wire` builds
    /// them: a thread that wants one knows what it is.
    pub fn submit_raw(
        &mut self,
        now: Instant,
        token: u64,
        command: Command,
        data: &[Segment],
        metadata: &[Segment],
        timeout: Option<Span>,
    ) -> Result<(), NotSubmitted> {
        self.queue.heed(now);
        if command.fuse() != Fuse::Normal {
            return Err(NotSubmitted::Fused);
        }
        let index = self.next_index()?;
        let mut command = command.with_cid(0);
        if !data.is_empty() {
            let built = self.build_whole(index, data)?;
            command = built.put_in(command);
        }
        if !metadata.is_empty() {
            let wanted = len_of(metadata)?;
            let dma = self.builder.lists.dma();
            let (iova, len_bytes) =
                Cursor::at(metadata, 0).metadata(dma, wanted).map_err(NotSubmitted::Memory)?;
            if len_bytes != wanted {
                return Err(NotSubmitted::Memory(MemoryRefused::Alignment));
            }
            command = command.with_mptr(iova);
        }
        let sent = match timeout {
            Some(timeout) => self.queue.enqueue_within(now, timeout, token, command),
            None => self.queue.enqueue(tick_of(now), token, Mark::NONE, command),
        };
        sent.map(|_| ()).ok_or(NotSubmitted::Full)
    }

    /// Writes some blocks if they hold what they must, as one operation that nothing comes between
    /// (NVM 1.1 §2.1.4). The answer is [`Outcome::COMPARE_FAILURE`] if they do not.
    pub fn submit_compare_and_write(
        &mut self,
        now: Instant,
        token: u64,
        pair: CompareAndWrite<'_>,
    ) -> Result<(), NotSubmitted> {
        self.queue.heed(now);
        let CompareAndWrite { blocks: Stretch { lba, blocks }, compare, write, flags } = pair;
        if blocks > self.builder.view.blocks_max.compare_and_write {
            return Err(NotSubmitted::Refused(Outcome::INVALID_FIELD));
        }
        self.next_index()?;
        let [first, second] = self.queue.next_two_indexes().ok_or(NotSubmitted::Full)?;
        let halves = [(Operation::Compare, compare, first), (Operation::Write, write, second)];
        let mut commands = [Command::default(); 2];
        for ((operation, segments, index), command) in halves.into_iter().zip(&mut commands) {
            let request = Request {
                token,
                lba,
                operand: 0,
                blocks,
                segment_first: 0,
                segment_count: u16::try_from(segments.len()).unwrap_or(u16::MAX),
                metadata_count: 0,
                operation,
                flags,
            };
            *command = self.half(index, &request, segments)?;
        }
        let parent = self.parents.begin_sent(token, 2).ok_or(NotSubmitted::Full)?;
        let [compare, write] = commands.map(|command| (parent as u64, command));
        let sent = self.queue.enqueue_fused(tick_of(now), Mark::CHILD, compare, write);
        assert!(sent.is_some(), "two slots were free");
        Ok(())
    }

    /// One half of a fused pair, which cannot be split.
    fn half(
        &mut self,
        index: usize,
        request: &Request,
        segments: &[Segment],
    ) -> Result<Command, NotSubmitted> {
        self.builder.check(request, segments).map_err(NotSubmitted::Refused)?;
        let made = self.builder.next_command(index, request, segments, 0);
        let (command, blocks) = made.map_err(NotSubmitted::Refused)?;
        if blocks < request.blocks {
            return Err(NotSubmitted::Refused(Outcome::INVALID_FIELD));
        }
        Ok(command)
    }

    /// The slot that the next command gets.
    fn next_index(&self) -> Result<usize, NotSubmitted> {
        match self.queue.standing() {
            Order::Run => self.queue.next_index().ok_or(NotSubmitted::Full),
            Order::Dead => Err(NotSubmitted::Dead),
            Order::Quiesce | Order::Freeze | Order::Release => Err(NotSubmitted::Full),
        }
    }

    /// A data pointer to all of `data`.
    fn build_whole(
        &mut self,
        index: usize,
        data: &[Segment],
    ) -> Result<crate::data_pointer::Pointer, NotSubmitted> {
        let wanted = len_of(data)?;
        let bytes_max = self.transfer_bytes_max();
        if wanted > bytes_max {
            return Err(NotSubmitted::TooLong { bytes_max });
        }
        let built = self.builder.lists.build(index, Cursor::at(data, 0), wanted, 1);
        let built = built.map_err(NotSubmitted::Memory)?;
        if built.len_bytes != wanted {
            return Err(NotSubmitted::Memory(MemoryRefused::Alignment));
        }
        Ok(built.pointer)
    }

    /// Bytes in the largest single command.
    fn transfer_bytes_max(&self) -> u32 {
        let lists = self.builder.lists.transfer_bytes_max();
        match self.builder.view.transfer_bytes_max {
            0 => lists,
            limit => limit.min(lists),
        }
    }
}

fn len_of(segments: &[Segment]) -> Result<u32, NotSubmitted> {
    let sum: u64 = segments.iter().map(|segment| u64::from(segment.len_bytes)).sum();
    u32::try_from(sum).map_err(|_| NotSubmitted::TooLong { bytes_max: u32::MAX })
}

impl fmt::Display for NotSubmitted {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => write!(out, "submit a command: the queue is full"),
            Self::Dead => write!(out, "submit a command: the controller is gone"),
            Self::Memory(MemoryRefused::Alignment) => {
                write!(
                    out,
                    "submit a command: its memory is not aligned as the controller needs it"
                )
            }
            Self::Memory(MemoryRefused::Unreachable) => {
                write!(out, "submit a command: its memory is out of the device's reach")
            }
            Self::Memory(MemoryRefused::TooShort) => {
                write!(out, "submit a command: its memory is shorter than its data")
            }
            Self::TooLong { bytes_max } => {
                write!(out, "submit a command: it moves more than {bytes_max} bytes")
            }
            Self::Refused(outcome) => {
                write!(out, "submit a command: refused with status {:#06x}", outcome.0)
            }
            Self::Fused => write!(out, "submit a command: it is half of a fused pair"),
        }
    }
}

impl core::error::Error for NotSubmitted {}
