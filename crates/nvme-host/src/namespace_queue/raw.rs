//! Raw commands built by the caller, and fused Compare and Write.

use core::fmt;

use tenmil_base::{Instant, IoStatus, Operation, Request, RequestFlags, Segment, Span};
use tenmil_wire::{Command, Fuse};

use super::{BlockRange, NamespaceQueue};
use crate::data_pointer::{DataPointerError, SegmentListCursor};
use crate::queue_link::QueueState;
use crate::queue_pair::{DataPointers, PointerOf, Transport};
use crate::slot_table::{SlotFlags, tick_of};

/// Reason why a command was not submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawSubmitError {
    /// The queue is full.
    Full,
    /// The controller has failed permanently or was removed.
    Dead,
    /// The memory cannot be described by a data pointer.
    Memory(DataPointerError),
    /// The data is larger than one command can transfer.
    TooLarge {
        /// Maximum bytes of one command.
        bytes_max: u32,
    },
    /// The request is invalid, or the controller does not support the operation.
    Refused(IoStatus),
    /// A single command of a fused pair cannot be submitted.
    Fused,
}

/// Fused Compare and Write.
#[derive(Clone, Copy, Debug)]
pub struct CompareAndWrite<'a> {
    /// Block range.
    pub blocks: BlockRange,
    /// Expected data.
    pub compare: &'a [Segment],
    /// Data to write.
    pub write: &'a [Segment],
    /// FUA and limited retry.
    pub flags: RequestFlags,
}

impl<T: Transport> NamespaceQueue<T> {
    /// Submits a command built by the caller, with data pointers to `data` and `metadata`. Without data
    /// segments the data pointer is left unchanged, and without metadata segments the metadata pointer.
    ///
    /// The result of the completion is its dword 0. Reservation commands, built by `wire`, are submitted
    /// this way.
    pub fn submit_raw(
        &mut self,
        now: Instant,
        token: u64,
        command: Command,
        data: &[Segment],
        metadata: &[Segment],
        timeout: Option<Span>,
    ) -> Result<(), RawSubmitError> {
        self.queue.check_state(now);
        if command.fuse() != Fuse::Normal {
            return Err(RawSubmitError::Fused);
        }
        // PRP and SGL lists are stored per slot, so the slot must be known before they are built.
        let index = self.next_index()?;
        let mut command = command.with_cid(0);
        let pointer = match data {
            [] => PointerOf::<T>::default(),
            data => self.build_whole_pointer(index, data)?,
        };
        if !metadata.is_empty() {
            let wanted = len_of(metadata)?;
            let (iova, len_bytes) = self
                .builder
                .lists
                .metadata_address(SegmentListCursor::at(metadata, 0), wanted)
                .map_err(RawSubmitError::Memory)?;
            if len_bytes != wanted {
                return Err(RawSubmitError::Memory(DataPointerError::Alignment));
            }
            command = command.with_mptr(iova);
        }
        let (entry, lists) = ((command, pointer), Some(&mut self.builder.lists));
        let sent = match timeout {
            Some(timeout) => self.queue.enqueue_within(now, timeout, token, entry, lists),
            None => self.queue.enqueue(tick_of(now), token, SlotFlags::NONE, entry, lists),
        };
        sent.map(|_| ()).ok_or(RawSubmitError::Full)
    }

    /// Writes blocks if they contain the expected data, as one atomic operation (NVM 1.1 §2.1.4).
    /// Otherwise the status is [`IoStatus::COMPARE_FAILURE`].
    pub fn submit_compare_and_write(
        &mut self,
        now: Instant,
        token: u64,
        pair: CompareAndWrite<'_>,
    ) -> Result<(), RawSubmitError> {
        self.queue.check_state(now);
        let CompareAndWrite { blocks: BlockRange { lba, blocks }, compare, write, flags } = pair;
        if blocks > self.builder.view.blocks_max.compare_and_write {
            return Err(RawSubmitError::Refused(IoStatus::INVALID_FIELD));
        }
        self.next_index()?;
        let [first, second] = self.queue.next_two_indexes().ok_or(RawSubmitError::Full)?;
        let halves = [(Operation::Compare, compare, first), (Operation::Write, write, second)];
        let mut entries = [(Command::default(), PointerOf::<T>::default()); 2];
        for ((operation, segments, index), entry) in halves.into_iter().zip(&mut entries) {
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
            *entry = self.fused_command(index, &request, segments)?;
        }
        let parent = self.parents.begin_all_sent(token, 2).ok_or(RawSubmitError::Full)?;
        let [compare, write] = entries.map(|(command, pointer)| (parent as u64, command, pointer));
        let sent = self.queue.enqueue_fused(
            tick_of(now),
            SlotFlags::CHILD,
            compare,
            write,
            Some(&mut self.builder.lists),
        );
        assert!(sent.is_some(), "two slots were free");
        Ok(())
    }

    /// Builds one command of a fused pair, which cannot be split.
    fn fused_command(
        &mut self,
        index: usize,
        request: &Request,
        segments: &[Segment],
    ) -> Result<(Command, PointerOf<T>), RawSubmitError> {
        self.builder.check_request(request, segments).map_err(RawSubmitError::Refused)?;
        let made = self.builder.next_command(index, request, segments, 0);
        let (entry, blocks) = made.map_err(RawSubmitError::Refused)?;
        if blocks < request.blocks {
            return Err(RawSubmitError::Refused(IoStatus::INVALID_FIELD));
        }
        Ok(entry)
    }

    /// Slot of the next command.
    fn next_index(&self) -> Result<usize, RawSubmitError> {
        match self.queue.state() {
            QueueState::Running => self.queue.next_index().ok_or(RawSubmitError::Full),
            QueueState::Dead => Err(RawSubmitError::Dead),
            QueueState::Quiescing | QueueState::Frozen | QueueState::Released => {
                Err(RawSubmitError::Full)
            }
        }
    }

    /// Builds a data pointer to all of `data`.
    fn build_whole_pointer(
        &mut self,
        index: usize,
        data: &[Segment],
    ) -> Result<PointerOf<T>, RawSubmitError> {
        let wanted = len_of(data)?;
        let bytes_max = self.transfer_bytes_max();
        if wanted > bytes_max {
            return Err(RawSubmitError::TooLarge { bytes_max });
        }
        let built = self.builder.lists.build(index, SegmentListCursor::at(data, 0), wanted, 1);
        let built = built.map_err(RawSubmitError::Memory)?;
        if built.len_bytes != wanted {
            return Err(RawSubmitError::Memory(DataPointerError::Alignment));
        }
        Ok(built.pointer)
    }

    /// Maximum bytes of one command.
    fn transfer_bytes_max(&self) -> u32 {
        let lists = self.builder.lists.transfer_bytes_max();
        match self.builder.view.transfer_bytes_max {
            0 => lists,
            limit => limit.min(lists),
        }
    }
}

fn len_of(segments: &[Segment]) -> Result<u32, RawSubmitError> {
    let sum: u64 = segments.iter().map(|segment| u64::from(segment.len_bytes)).sum();
    u32::try_from(sum).map_err(|_| RawSubmitError::TooLarge { bytes_max: u32::MAX })
}

impl fmt::Display for RawSubmitError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => write!(out, "submit a command: the queue is full"),
            Self::Dead => write!(out, "submit a command: the controller was removed"),
            Self::Memory(DataPointerError::Alignment) => {
                write!(
                    out,
                    "submit a command: its memory is not aligned as the controller needs it"
                )
            }
            Self::Memory(DataPointerError::Unreachable) => {
                write!(out, "submit a command: its memory is out of the device's reach")
            }
            Self::Memory(DataPointerError::TooShort) => {
                write!(out, "submit a command: its memory is shorter than its data")
            }
            Self::TooLarge { bytes_max } => {
                write!(out, "submit a command: it transfers more than {bytes_max} bytes")
            }
            Self::Refused(status) => {
                write!(out, "submit a command: refused: {status}")
            }
            Self::Fused => write!(out, "submit a command: it is half of a fused pair"),
        }
    }
}

impl core::error::Error for RawSubmitError {}
