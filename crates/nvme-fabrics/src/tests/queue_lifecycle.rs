//! Admin commands, and creation and deletion of I/O queues, of a controller without a path.

use tenmil_base::{CompletionBatch, IoCompletion, IoStatus, Operation, Request, Segment, Span};
use tenmil_nvme_host::{
    Event, FastPathOptions, QueuePairOptions, QueueSizes, QueueState, ResetCause,
};
use tenmil_wire::{AdminOpcode, Command, Status};

use super::bed::Bed;
use crate::controller::FabricsController;
use crate::fabrics_queue_pair::QueuePairState;
use crate::timeout_policy::TimeoutPolicy;

/// Interval of polls.
const POLL: Span = Span::from_us(50);

fn ready_controller(bed: &mut Bed) -> FabricsController {
    let mut remote = bed.call_controller(Bed::options()).unwrap();
    bed.await_event(&mut remote, &Event::Ready);
    remote
}

/// Status of an admin command of the owner.
fn admin_status(
    bed: &mut Bed,
    remote: &mut FabricsController,
    command: Command,
    data: Option<Segment>,
) -> Status {
    remote.controller().submit_admin(bed.now, 7, command, data).unwrap();
    loop {
        bed.now = bed.now.after(POLL);
        bed.target.turn(bed.now);
        if let Some(Event::AdminCompleted(IoCompletion { token: 7, status, .. })) =
            remote.poll(bed.now)
        {
            return Status(status.0);
        }
    }
}

#[test]
fn admin_commands_that_the_transport_cannot_transfer_are_completed_and_not_sent() {
    let mut bed = Bed::new();
    let mut remote = ready_controller(&mut bed);
    let whole = bed.memory.slice(0, 4096).unwrap();
    let odd = bed.memory.slice(0, 6).unwrap();
    let log_page = Command::new(AdminOpcode::GetLogPage.code());
    let sent = bed.target.state().admin_commands;
    for (command, data, expected) in [
        (log_page, Some(odd), Status::SGL_DATA_BLOCK_GRANULARITY_INVALID),
        // Opcodes for data in both directions.
        (Command::new(0b11), Some(whole), Status::INVALID_OPCODE),
        // An address means nothing to a connection.
        (log_page.with_prp(4096, 0), None, Status::INVALID_FIELD),
    ] {
        assert_eq!(admin_status(&mut bed, &mut remote, command, data), expected);
    }
    assert_eq!(bed.target.state().admin_commands, sent, "none of them was sent");
}

#[test]
fn deleted_queue_closes_its_connection_and_its_identifier_is_used_again() {
    let mut bed = Bed::new();
    let (mut remote, mut queue_pair) = bed.raw_queue_pair(8);
    assert_eq!(bed.target.state().connects, [0, 1]);
    remote.controller().delete_queue_pair(bed.now, 1).unwrap();
    let mut completions = CompletionBatch::with_capacity(8);
    loop {
        bed.now = bed.now.after(POLL);
        bed.target.turn(bed.now);
        queue_pair.poll(bed.now, &mut completions);
        if remote.poll(bed.now) == Some(Event::QueuePairDeleted { id: 1 }) {
            break;
        }
    }
    queue_pair.poll(bed.now, &mut completions);
    assert_eq!(queue_pair.driver_state(), QueueState::Dead);
    let options =
        QueuePairOptions { depth: 8, vector: None, techniques: FastPathOptions::default() };
    assert_eq!(remote.controller().create_queue_pair(bed.now, options), Ok(1));
    bed.await_event(&mut remote, &Event::QueuePairCreated { id: 1 });
    assert_eq!(bed.target.state().connects, [0, 1, 1]);
    // The owner of the deleted queue pair still polls it, which does not take the new connection.
    queue_pair.poll(bed.now, &mut completions);
    let mut successor = remote.take_queue_pair(1, 1, QueueSizes::default()).unwrap();
    successor.poll(bed.now, &mut completions);
    let states = [queue_pair.state(), successor.state()];
    assert_eq!(states, [QueuePairState::Disconnected, QueuePairState::Open]);
}

/// Its thread may not run for a long time, and its connection may still send.
#[test]
fn queue_that_is_not_closed_in_time_is_ended_by_a_reset() {
    let mut bed = Bed::new();
    let (mut remote, mut queue_pair) = bed.raw_queue_pair(8);
    bed.target.state().is_idle = true;
    let memory = bed.place(0, 8);
    let request = Request { token: 9, ..Bed::request(Operation::Read, 0, &[memory], 9) };
    assert_eq!(queue_pair.submit(bed.now, &[request], &[memory]), 1);
    queue_pair.flush();
    remote.controller().delete_queue_pair(bed.now, 1).unwrap();
    let begun = bed.now;
    let cause = loop {
        bed.now = bed.now.after(POLL);
        bed.target.turn(bed.now);
        if let Some(Event::ResetStarted { cause }) = remote.poll(bed.now) {
            break cause;
        }
        assert!(bed.now.since(begun) < Span::from_secs(120), "the deletion never ends");
    };
    let waited = bed.now.since(begun);
    assert!(waited >= TimeoutPolicy::default().connect, "{waited}");
    assert!(matches!(cause, ResetCause::QueueDeletionFailed { id: 1, .. }), "{cause}");
    // From here on the thread runs again: the command ends when the controller cannot execute it.
    let mut completions = CompletionBatch::with_capacity(8);
    bed.target.state().is_idle = false;
    while completions.as_slice().is_empty() {
        bed.now = bed.now.after(POLL);
        bed.target.turn(bed.now);
        queue_pair.poll(bed.now, &mut completions);
        let _ = remote.poll(bed.now);
    }
    assert_eq!(completions.as_slice()[0].status, IoStatus::ABORTED_BY_HOST);
}
