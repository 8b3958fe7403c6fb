//! Device side of a pair of rings: moves commands from the submission ring to a connection, and
//! completions into the completion ring.
//!
//! ```text
//!   doorbell ──▶ tail                        posted ──▶ tail, phase
//!   submission | · · · c c c · |  completion | a a a · · · |
//!                      └─ head, the next command
//! ```
//!
//! Only the admin queue has rings. A command has the identifier of the driver on the wire, too, so an
//! Abort names the same command on both sides.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::{AccessId, HostMemory, RingEntries, RingMemory, Segment, entry_from_dwords};
use tenmil_dma::{SharedEntries, SharedHostMemory};
use tenmil_nvme_tcp::{DataDirection, SendQueueFull};
use tenmil_wire::sgl::{DataLocation, Descriptor, DescriptorKind};
use tenmil_wire::{Command, Completion, DataPointer, Status};

use crate::queue_connection::{CommandData, CompletedCommand, QueueConnection};

/// A pair of rings, from the device's side.
#[derive(Debug)]
pub(crate) struct RingPair {
    commands: SharedEntries,
    completions: SharedEntries,
    memory: SharedHostMemory,
    tail_doorbell: TailDoorbell,
    queue: u16,
    depth: u32,
    completion_depth: u32,
    /// Index of the next command.
    head: u32,
    /// Index of the next completion.
    tail: u32,
    phase: bool,
    /// Completions created locally.
    local_completions: Vec<Completion>,
}

/// Submission doorbell: a word that the driver stores and the device side loads.
///
/// Completion queue doorbells are not used: a queue pair never has more commands outstanding than its
/// completion ring has entries.
#[derive(Clone, Debug, Default)]
pub struct TailDoorbell(Arc<AtomicU32>);

/// Addresses and depths of a pair of rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingAddresses {
    pub(crate) submission: u64,
    pub(crate) submission_depth: u32,
    pub(crate) completion: u64,
    pub(crate) completion_depth: u32,
}

/// Maximum number of descriptors in an SGL segment of the driver.
const DESCRIPTORS_MAX: usize = 256;

impl tenmil_base::Doorbell for TailDoorbell {
    #[inline]
    fn ring(&mut self, value: u32) {
        // Pairs with the acquire in `load`: a reader that sees the tail sees the commands before it.
        self.0.store(value, Ordering::Release);
    }
}

impl TailDoorbell {
    #[inline]
    pub(crate) fn load(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

impl RingPair {
    /// The rings at `addresses`, empty. `None` if they are not in memory suitable for rings.
    pub(crate) fn new(
        mut memory: SharedHostMemory,
        addresses: RingAddresses,
        tail_doorbell: TailDoorbell,
        queue: u16,
    ) -> Option<Self> {
        let RingAddresses { submission, submission_depth, completion, completion_depth } =
            addresses;
        let mut entries =
            |iova, depth: u32, bytes| memory.entries(iova, u64::from(depth) * bytes).ok().flatten();
        let commands = entries(submission, submission_depth, 64)?;
        let completions = entries(completion, completion_depth, 16)?;
        Some(Self {
            commands,
            completions,
            memory,
            tail_doorbell,
            queue,
            depth: submission_depth,
            completion_depth,
            head: 0,
            tail: 0,
            phase: true,
            local_completions: Vec::new(),
        })
    }

    /// The driver's doorbell value.
    #[inline]
    pub(crate) fn doorbell(&self) -> u32 {
        self.tail_doorbell.load()
    }

    /// The next command before `doorbell`; it is not consumed.
    #[inline]
    pub(crate) fn next(&self, doorbell: u32) -> Option<Command> {
        if self.head == doorbell || doorbell >= self.depth {
            return None;
        }
        self.commands.load_command(self.head).ok().map(Command)
    }

    /// Consumes the next command.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.head += 1;
        if self.head == self.depth {
            self.head = 0;
        }
    }

    /// Submits one command to `connection`, or returns why it is invalid.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        command: &Command,
        connection: &mut QueueConnection,
    ) -> Result<Result<(), SendQueueFull>, Status> {
        let direction = command.opcode() & 0b11;
        let Descriptor([iova, rest]) = command.sgl1();
        let is_plain = rest >> 32 == 0 && command.psdt() == DataPointer::Sgl;
        if is_plain && let Ok(len_bytes @ 4..) = u32::try_from(rest) {
            let data = data_direction(direction, len_bytes)?;
            return match self.memory.resolve(iova, len_bytes).ok().flatten() {
                Some(segment) => Ok(connection.submit_segment(command, data, segment)),
                None => Err(Status::DATA_TRANSFER_ERROR),
            };
        }
        self.submit_slow_path(command, connection)
    }

    #[cold]
    fn submit_slow_path(
        &mut self,
        command: &Command,
        connection: &mut QueueConnection,
    ) -> Result<Result<(), SendQueueFull>, Status> {
        let no_segment = Segment::default();
        let has_data = command.opcode() & 0b11 != 0
            && (command.psdt() != DataPointer::Prp || command.prp1() != 0);
        if !has_data {
            return Ok(connection.submit_segment(command, DataDirection::None, no_segment));
        }
        if command.psdt() != DataPointer::Sgl {
            return Err(Status::INVALID_FIELD);
        }
        match command.sgl1().decode() {
            DescriptorKind::LastSegment { location: DataLocation::Address(iova), len_bytes } => {
                let mut list = Vec::new();
                let len_bytes = self.resolve(iova, len_bytes, &mut list)?;
                let data = data_direction(command.opcode() & 0b11, len_bytes)?;
                let data = CommandData::List(data, list);
                Ok(connection.submit(command, data).map_err(|(full, _)| full))
            }
            DescriptorKind::DataBlock { len_bytes: 0, .. } => {
                Ok(connection.submit_segment(command, DataDirection::None, no_segment))
            }
            DescriptorKind::DataBlock { .. } => Err(Status::DATA_SGL_LENGTH_INVALID),
            _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
        }
    }

    /// Resolves an SGL segment into `into`. Returns the total number of bytes.
    fn resolve(
        &mut self,
        iova: u64,
        len_bytes: u32,
        into: &mut Vec<Segment>,
    ) -> Result<u32, Status> {
        let mut bytes = [[0; Descriptor::BYTES]; DESCRIPTORS_MAX];
        let count = len_bytes as usize / Descriptor::BYTES;
        let list = bytes.get_mut(..count).ok_or(Status::DATA_SGL_LENGTH_INVALID)?;
        let read = self.memory.read(AccessId(0), iova, list.as_flattened_mut());
        read.map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        into.clear();
        let mut total = 0_u32;
        for descriptor in list {
            let DescriptorKind::DataBlock { location: DataLocation::Address(iova), len_bytes } =
                Descriptor::from_bytes(descriptor).decode()
            else {
                return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID);
            };
            let segment = self.memory.resolve(iova, len_bytes).ok().flatten();
            into.push(segment.ok_or(Status::DATA_TRANSFER_ERROR)?);
            total = total.checked_add(len_bytes).ok_or(Status::DATA_SGL_LENGTH_INVALID)?;
        }
        Ok(total)
    }

    /// Completes `command` locally, in the next [`post_local_completions`](Self::post_local_completions).
    #[cold]
    pub(crate) fn complete_locally(&mut self, command: &Command, status: Status) {
        self.local_completions.push(Completion::new(command.cid(), status));
    }

    #[inline]
    pub(crate) fn post_local_completions(&mut self) {
        while let Some(completion) = self.local_completions.pop() {
            self.post(completion.cid(), completion);
        }
    }

    /// Posts a completion with command identifier `cid`.
    #[inline]
    pub(crate) fn post(&mut self, cid: u16, completion: Completion) {
        let Completion([first, second, _, last]) = completion;
        let third = u32::from(self.queue) << 16 | self.head;
        let status = last >> 17 << 17 | u32::from(self.phase) << 16 | u32::from(cid);
        let entry = entry_from_dwords([first, second, third, status]);
        let stored = self.completions.store_completion(self.tail, entry);
        assert!(stored.is_ok(), "the tail is in range: the rings were resolved as a whole");
        self.tail += 1;
        if self.tail == self.completion_depth {
            (self.tail, self.phase) = (0, !self.phase);
        }
    }

    /// Like [`post`](Self::post), for a completion from the connection.
    #[inline]
    pub(crate) fn post_from_connection(&mut self, command: CompletedCommand) {
        let CompletedCommand { cid, completion } = command;
        // Only a host may use this status (NVM Express Base 2.1, section 4.2.3.4), and it would cause
        // endless retries.
        let is_invalid = completion.status().same_code(Status::ABORTED_BY_HOST);
        let checked = if is_invalid {
            completion.with_status(Status::INTERNAL_PATH_ERROR)
        } else {
            completion
        };
        self.post(cid, checked);
    }
}

/// Data transfer of a command, by the low bits of its opcode.
#[inline]
fn data_direction(direction: u8, len_bytes: u32) -> Result<DataDirection, Status> {
    match direction {
        // The transport transfers dwords (NVM Express TCP Transport 1.0, section 3.6.2.8).
        _ if len_bytes & 3 != 0 => Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID),
        0b10 => Ok(DataDirection::ToHost(len_bytes)),
        0b01 => Ok(DataDirection::FromHost(len_bytes)),
        0b00 => Ok(DataDirection::None),
        _ => Err(Status::INVALID_OPCODE),
    }
}

/// Number of commands that can be outstanding on rings of this depth: one entry is never used.
pub(crate) fn slots_of(depth: u32) -> u16 {
    u16::try_from(depth - 1).unwrap_or(u16::MAX - 1)
}
