//! How the queues of a controller are created, and over which transport.
//!
//! | queues | admin queue | an I/O queue is created by | deleted by |
//! |---|---|---|---|
//! | [`RingQueues`] | AQA, ASQ, ACQ | Create I/O Completion Queue, Create I/O Submission Queue | the two Delete commands |
//! | of NVMe/TCP | a connection | Connect, on a connection of its own, which is the attachment of the queue's next run | its thread, which closes the connection when the queue is frozen |

use tenmil_base::{Dma, Mmio, Segment};
use tenmil_wire::admin::{
    CreateIoCompletionQueue, CreateIoSubmissionQueue, DeleteIoCompletionQueue,
    DeleteIoSubmissionQueue, QueuePriority,
};
use tenmil_wire::register::offset;
use tenmil_wire::{Command, Status, TypedCommand};

use super::admin_pointers;
use crate::bringup::AdminQueueAddresses;
use crate::data_pointer::{ListPool, SglSupport};
use crate::error::{ControllerError, RequestError};
use crate::fast_path_options::FastPathOptions;
use crate::queue_link::LinkSignals;
use crate::queue_pair::{
    AttachmentOf, DoorbellSide, QueueDoorbell, QueueMemory, RingTransport, ShadowSlot, Transport,
};

/// Creates and deletes the queues of a controller with registers `M` and memory `D`.
///
/// Creation and deletion of an I/O queue have [`STEPS`](Self::STEPS) steps each, performed one after the
/// other. The last steps of a deletion undo the first steps of a creation, so a creation that fails in
/// step `n` is rolled back by the last `n` steps of the deletion.
pub trait QueueTransports<M: Mmio, D: Dma> {
    /// Transport of the admin queue.
    type Admin: Transport;
    /// Transport of an I/O queue.
    type Io: Transport;

    /// Whether a queue has rings, in memory that the controller allocates and the device accesses.
    const HAS_RINGS: bool;
    /// Number of steps of a creation, and of a deletion.
    const STEPS: u8;

    /// Creates the transport of the admin queue.
    fn create_admin_transport(
        mmio: &mut M,
        dma: &D,
        setup: AdminQueueSetup,
    ) -> Result<Self::Admin, ControllerError>;

    /// Creates the builder for data pointers of `lists` admin commands at once. `None` if memory is
    /// exhausted.
    fn create_admin_pointers(dma: &D, lists: u32) -> Option<<Self::Admin as Transport>::Pointers>;

    /// Creates the transport of an I/O queue.
    fn create_io_transport(
        mmio: &mut M,
        dma: &D,
        setup: IoQueueSetup,
    ) -> Result<Self::Io, RequestError>;

    /// Starts a step of the creation of a queue.
    fn start_create_step(mmio: &mut M, dma: &D, queue: IoQueueParams, step: u8) -> QueueStep;

    /// Starts a step of the deletion of a queue. A queue without rings is frozen.
    fn start_delete_step(mmio: &mut M, id: u16, step: u8) -> QueueStep;

    /// Result of a step that was [started](QueueStep::Started), with the identifier of its queue.
    fn next_step_result(_: &mut M) -> Option<(u16, StepResult<Self::Io>)> {
        None
    }
}

/// Result of a step. The last step of a creation has what the transport is attached to, if anything;
/// no other step has.
pub type StepResult<T> = Result<Option<AttachmentOf<T>>, Status>;

/// A step of a creation or deletion.
#[derive(Clone, Copy, Debug)]
pub enum QueueStep {
    /// An admin command, whose completion is the result.
    Command(Command),
    /// It was started; its result is returned by [`QueueTransports::next_step_result`].
    Started,
}

/// Parameters of the admin queue.
#[derive(Clone, Copy, Debug)]
pub struct AdminQueueSetup {
    /// Entries; one command fewer can be outstanding.
    pub depth: u32,
    /// Its rings, if it has any.
    pub memory: Option<QueueMemory>,
    /// CAP.DSTRD.
    pub doorbell_stride: u8,
}

/// Parameters of the transport of an I/O queue.
#[derive(Clone, Debug)]
pub struct IoQueueSetup {
    /// Queue identifier.
    pub id: u16,
    /// Entries; one command fewer can be outstanding.
    pub depth: u32,
    /// Its rings, if it has any.
    pub memory: Option<QueueMemory>,
    /// CAP.DSTRD.
    pub doorbell_stride: u8,
    /// Shadow doorbells and event indices, if they are in use.
    pub shadows: Option<[Segment; 2]>,
    /// Fast-path switches.
    pub techniques: FastPathOptions,
    /// State of its link, for a transport that sends by itself.
    pub signals: LinkSignals,
}

/// Parameters of an I/O queue at its creation in the controller.
#[derive(Clone, Copy, Debug)]
pub struct IoQueueParams {
    /// Queue identifier.
    pub id: u16,
    /// Entries; one command fewer can be outstanding.
    pub depth: u32,
    /// Its rings, if it has any.
    pub memory: Option<QueueMemory>,
    /// Interrupt vector for its completions, if any.
    pub vector: Option<u16>,
}

/// Queues in memory that the device accesses, as on PCIe.
#[derive(Debug)]
pub struct RingQueues;

/// Steps of [`RingQueues`]: the completion queue is created first and deleted last.
const FIRST: u8 = 0;

impl<M: Mmio, D: Dma> QueueTransports<M, D> for RingQueues {
    type Admin = RingTransport<D, M::Doorbell>;
    type Io = RingTransport<D, M::Doorbell>;

    const HAS_RINGS: bool = true;
    const STEPS: u8 = 2;

    fn create_admin_transport(
        mmio: &mut M,
        dma: &D,
        setup: AdminQueueSetup,
    ) -> Result<Self::Admin, ControllerError> {
        let stride = setup.doorbell_stride;
        let mut doorbell = |offset: usize| {
            // The first two doorbells belong to the admin queue.
            QueueDoorbell::Register(mmio.doorbell(u32::try_from(offset).unwrap_or(u32::MAX)))
        };
        let doorbells = [
            doorbell(offset::submission_doorbell_offset(0, stride)),
            doorbell(offset::completion_doorbell_offset(0, stride)),
        ];
        Ok(RingTransport::new(dma, rings_of(setup.memory), doorbells, FastPathOptions::default()))
    }

    fn create_admin_pointers(dma: &D, lists: u32) -> Option<ListPool<D>> {
        let (transfer_bytes_max, page) = (admin_pointers::TRANSFER_BYTES_MAX, admin_pointers::PAGE);
        ListPool::allocate(dma, lists, transfer_bytes_max, page, SglSupport::None)
    }

    fn create_io_transport(
        mmio: &mut M,
        dma: &D,
        setup: IoQueueSetup,
    ) -> Result<Self::Io, RequestError> {
        let doorbells = [
            io_queue_doorbell(mmio, dma, &setup, DoorbellSide::Submission)?,
            io_queue_doorbell(mmio, dma, &setup, DoorbellSide::Completion)?,
        ];
        Ok(RingTransport::new(dma, rings_of(setup.memory), doorbells, setup.techniques))
    }

    fn start_create_step(_: &mut M, dma: &D, queue: IoQueueParams, step: u8) -> QueueStep {
        let (memory, id) = (rings_of(queue.memory), queue.id);
        let iova = |ring| dma.iova(ring).expect("a ring has had an address since it was allocated");
        let command = if step == FIRST {
            let command = CreateIoCompletionQueue {
                qid: id,
                qsize: zero_based(memory.completion_depth),
                pc: true,
                ien: queue.vector.is_some(),
                iv: queue.vector.unwrap_or(0),
            };
            command.to_command().with_prp(iova(memory.completion), 0)
        } else {
            let command = CreateIoSubmissionQueue {
                qid: id,
                qsize: zero_based(memory.submission_depth),
                pc: true,
                qprio: QueuePriority::Medium,
                cqid: id,
                ..CreateIoSubmissionQueue::default()
            };
            command.to_command().with_prp(iova(memory.submission), 0)
        };
        QueueStep::Command(command)
    }

    fn start_delete_step(_: &mut M, id: u16, step: u8) -> QueueStep {
        QueueStep::Command(if step == FIRST {
            DeleteIoSubmissionQueue { qid: id }.to_command()
        } else {
            DeleteIoCompletionQueue { qid: id }.to_command()
        })
    }
}

/// Addresses of the admin rings, for AQA, ASQ and ACQ.
pub(super) fn admin_queue_addresses<D: Dma>(
    dma: &D,
    memory: QueueMemory,
) -> Result<AdminQueueAddresses, ControllerError> {
    let unreachable = ControllerError::Unreachable { what: "the admin queue" };
    Ok(AdminQueueAddresses {
        submission_iova: dma.iova(memory.submission).ok_or(unreachable)?,
        completion_iova: dma.iova(memory.completion).ok_or(unreachable)?,
        depth: memory.submission_depth,
    })
}

fn io_queue_doorbell<M: Mmio, D: Dma>(
    mmio: &mut M,
    dma: &D,
    setup: &IoQueueSetup,
    side: DoorbellSide,
) -> Result<QueueDoorbell<D, M::Doorbell>, RequestError> {
    let IoQueueSetup { id, doorbell_stride: stride, .. } = *setup;
    let at = match side {
        DoorbellSide::Submission => offset::submission_doorbell_offset(id, stride),
        DoorbellSide::Completion => offset::completion_doorbell_offset(id, stride),
    };
    let at = u32::try_from(at).map_err(|_| RequestError::NoSuchQueue { id })?;
    let register = mmio.doorbell(at);
    let Some([shadows, event_indexes]) = setup.shadows else {
        return Ok(QueueDoorbell::Register(register));
    };
    let slot = ShadowSlot::of(shadows, event_indexes, id, side, stride.into())
        .ok_or(RequestError::NoSuchQueue { id })?;
    Ok(QueueDoorbell::shadow(dma, register, slot))
}

fn rings_of(memory: Option<QueueMemory>) -> QueueMemory {
    memory.expect("the controller allocates rings for a transport that has them")
}

/// Depth, 0's based as in the commands. It was checked when the queue pair was created.
fn zero_based(depth: u32) -> u16 {
    u16::try_from(depth - 1).unwrap_or(u16::MAX)
}
