//! Transport of the admin queue pair: commands for the admin connection, and their completions.
//!
//! ```text
//!   queue pair ── submit ──▶ submitted ──▶ HostTransport ──▶ admin connection
//!   queue pair ◀─ complete ── completed ◀── HostTransport ◀──
//! ```
//!
//! Both sides are polled by the controller's thread. The connection belongs to [`HostTransport`], because
//! property commands share it, and because it exists before the queue and after it.
//! A command has the identifier of the queue pair on the wire, too, so an Abort names the same command on
//! both sides.
//!
//! [`HostTransport`]: crate::host_transport::HostTransport

use core::convert::Infallible;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{DoorbellStats, Instant, IoCompletion, IoStatus};
use tenmil_nvme_host::{NamespaceView, PointerOf, QueuePair, SplitTracker, Transport};
use tenmil_nvme_tcp::CannotSubmit;
use tenmil_wire::{Command, Status};

use crate::queue_connection::{CommandData, CompletedCommand, QueueConnection};
use crate::remote_dma::RemoteDma;
use crate::segment_lists::{SegmentLists, SegmentPointer};
use crate::tcp_transport::{command_data, completion_fields};

/// Transport of the admin queue pair.
pub struct AdminTransport {
    commands: AdminCommands,
    dma: RemoteDma,
    depth: u16,
}

/// Commands and completions between the queue pair and the connection.
#[derive(Clone, Default)]
pub(crate) struct AdminCommands(Arc<Mutex<AdminCommandQueues>>);

#[derive(Default)]
struct AdminCommandQueues {
    submitted: VecDeque<(Command, CommandData)>,
    completed: VecDeque<(u16, IoStatus, u32)>,
}

impl AdminCommands {
    fn lock(&self) -> MutexGuard<'_, AdminCommandQueues> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits the next command to `connection`, and returns it. `None` if there is none, or the
    /// connection does not accept it now.
    pub(crate) fn submit_next(&self, connection: &mut QueueConnection) -> Option<Command> {
        let mut queues = self.lock();
        let (command, data) = queues.submitted.pop_front()?;
        match connection.submit(&command, data) {
            Ok(()) => Some(command),
            Err((CannotSubmit, data)) => {
                queues.submitted.push_front((command, data));
                None
            }
        }
    }

    /// Completes a command.
    pub(crate) fn push_completed(&self, command: CompletedCommand) {
        self.lock().completed.push_back(completion_fields(command));
    }
}

impl AdminTransport {
    /// The transport for `depth` commands in flight.
    pub(crate) fn new(commands: AdminCommands, dma: RemoteDma, depth: u16) -> Self {
        Self { commands, dma, depth }
    }
}

impl Transport for AdminTransport {
    type Pointers = SegmentLists;
    type Attachment = Infallible;

    fn create_data_pointers(&self, _: &NamespaceView, depth: u32) -> Option<SegmentLists> {
        SegmentLists::allocate(&self.dma, depth)
    }

    fn depth(&self) -> u16 {
        self.depth
    }

    fn submit_each<I>(
        &mut self,
        items: &[I],
        make: impl FnMut(&I) -> Option<(Command, PointerOf<Self>)>,
    ) -> usize {
        let commands = items.iter().map_while(make);
        commands.map(|(command, pointer)| self.submit(command, pointer, None)).count()
    }

    fn submit(
        &mut self,
        command: Command,
        pointer: SegmentPointer,
        lists: Option<&mut SegmentLists>,
    ) {
        let mut queues = self.commands.lock();
        match validate_data(&command, pointer, lists) {
            Ok(data) => queues.submitted.push_back((command, data)),
            Err(status) => {
                queues.completed.push_back((command.cid(), IoStatus(status.0), 0));
            }
        }
    }

    /// The controller's poll sends what was submitted.
    fn flush(&mut self, _: u32) {}

    fn receive_completions<P: SplitTracker>(
        pair: &mut QueuePair<Self>,
        _: Instant,
        slots: &mut [IoCompletion],
        parents: &mut P,
    ) -> usize {
        pair.receive_with(slots, parents, |transport, sink| {
            let mut queues = transport.commands.lock();
            while !sink.is_full()
                && let Some((cid, status, result)) = queues.completed.pop_front()
            {
                sink.complete(cid, status, result);
            }
        })
    }

    fn arm(&mut self, accepts: bool) -> bool {
        accepts && !self.commands.lock().completed.is_empty()
    }

    fn attach(&mut self, attachment: Infallible) {
        match attachment {}
    }

    fn stop_sending(&mut self) {
        self.commands.lock().submitted.clear();
    }

    fn drop_outstanding(&mut self) {
        *self.commands.lock() = AdminCommandQueues::default();
    }

    fn doorbell_stats(&self, _: u64) -> DoorbellStats {
        DoorbellStats::default()
    }
}

/// Data of a command, or why the transport cannot transfer them.
fn validate_data(
    command: &Command,
    pointer: SegmentPointer,
    lists: Option<&mut SegmentLists>,
) -> Result<CommandData, Status> {
    let len_bytes = match pointer {
        SegmentPointer::None => 0,
        SegmentPointer::Contiguous(segment) | SegmentPointer::KernelBuffer(segment) => {
            segment.len_bytes
        }
        SegmentPointer::Listed { len_bytes, .. } => len_bytes,
    };
    // The transport transfers dwords (NVM Express TCP Transport 1.0, section 3.6.2.8).
    if len_bytes & 3 != 0 {
        return Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID);
    }
    command_data(command, pointer, lists)
}
