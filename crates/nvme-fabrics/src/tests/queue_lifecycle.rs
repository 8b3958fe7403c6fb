//! Admin commands, and creation and deletion of I/O queues, of a controller without a path.

use tenmil_base::{CompletionBatch, IoCompletion, IoStatus, Operation, Request, Segment, Span};
use tenmil_nvme_host::{
    Event, FastPathOptions, QueuePairOptions, QueueSizes, QueueState, ResetCause,
};
use tenmil_wire::{AdminOpcode, Command, Status};

use super::single_path_host::SinglePathHost;
use crate::fabrics_controller::FabricsController;
use crate::fabrics_queue_pair::QueuePairState;
use crate::timeout_policy::TimeoutPolicy;

/// Interval of polls.
const POLL: Span = Span::from_us(50);

fn ready_controller(host: &mut SinglePathHost) -> FabricsController {
    let mut remote = host.connect_controller(SinglePathHost::options()).unwrap();
    host.await_event(&mut remote, &Event::Ready);
    remote
}

/// Status of an admin command of the owner.
fn admin_status(
    host: &mut SinglePathHost,
    remote: &mut FabricsController,
    command: Command,
    data: Option<Segment>,
) -> Status {
    remote.controller().submit_admin(host.now, 7, command, data).unwrap();
    loop {
        host.now = host.now.after(POLL);
        host.target.step(host.now);
        if let Some(Event::AdminCompleted(IoCompletion { token: 7, status, .. })) =
            remote.poll(host.now)
        {
            return Status(status.0);
        }
    }
}

#[test]
fn admin_commands_that_the_transport_cannot_transfer_are_completed_and_not_sent() {
    let mut host = SinglePathHost::new();
    let mut remote = ready_controller(&mut host);
    let whole = host.memory.slice(0, 4096).unwrap();
    let odd = host.memory.slice(0, 6).unwrap();
    let log_page = Command::new(AdminOpcode::GetLogPage.code());
    let sent = host.target.state().admin_commands;
    for (command, data, expected) in [
        (log_page, Some(odd), Status::SGL_DATA_BLOCK_GRANULARITY_INVALID),
        // Opcodes for data in both directions.
        (Command::new(0b11), Some(whole), Status::INVALID_OPCODE),
        // An address means nothing to a connection.
        (log_page.with_prp(4096, 0), None, Status::INVALID_FIELD),
    ] {
        assert_eq!(admin_status(&mut host, &mut remote, command, data), expected);
    }
    assert_eq!(host.target.state().admin_commands, sent, "none of them was sent");
}

#[test]
fn deleted_queue_closes_its_connection_and_its_identifier_is_used_again() {
    let mut host = SinglePathHost::new();
    let (mut remote, mut queue_pair) = host.queue_pair_without_retries(8);
    assert_eq!(host.target.state().connects, [0, 1]);
    remote.controller().delete_queue_pair(host.now, 1).unwrap();
    let mut completions = CompletionBatch::with_capacity(8);
    loop {
        host.now = host.now.after(POLL);
        host.target.step(host.now);
        queue_pair.poll(host.now, &mut completions);
        if remote.poll(host.now) == Some(Event::QueuePairDeleted { id: 1 }) {
            break;
        }
    }
    queue_pair.poll(host.now, &mut completions);
    assert_eq!(queue_pair.driver_state(), QueueState::Dead);
    let options =
        QueuePairOptions { depth: 8, vector: None, techniques: FastPathOptions::default() };
    assert_eq!(remote.controller().create_queue_pair(host.now, options), Ok(1));
    host.await_event(&mut remote, &Event::QueuePairCreated { id: 1 });
    assert_eq!(host.target.state().connects, [0, 1, 1]);
    // The owner of the deleted queue pair still polls it, which does not take the new connection.
    queue_pair.poll(host.now, &mut completions);
    let mut successor = remote.take_queue_pair(1, 1, QueueSizes::default()).unwrap();
    successor.poll(host.now, &mut completions);
    let states = [queue_pair.state(), successor.state()];
    assert_eq!(states, [QueuePairState::Disconnected, QueuePairState::Open]);
}

/// Its thread may not run for a long time, and its connection may still send.
#[test]
fn queue_that_is_not_closed_in_time_is_ended_by_a_reset() {
    let mut host = SinglePathHost::new();
    let (mut remote, mut queue_pair) = host.queue_pair_without_retries(8);
    host.target.state().withholds_completions = true;
    let memory = host.buffer(0, 8);
    let request = Request { token: 9, ..SinglePathHost::request(Operation::Read, 0, &[memory], 9) };
    assert_eq!(queue_pair.submit(host.now, &[request], &[memory]), 1);
    queue_pair.flush();
    remote.controller().delete_queue_pair(host.now, 1).unwrap();
    let begun = host.now;
    let cause = loop {
        host.now = host.now.after(POLL);
        host.target.step(host.now);
        if let Some(Event::ResetStarted { cause }) = remote.poll(host.now) {
            break cause;
        }
        assert!(host.now.since(begun) < Span::from_secs(120), "the deletion never ends");
    };
    let waited = host.now.since(begun);
    assert!(waited >= TimeoutPolicy::default().connect, "{waited}");
    assert!(matches!(cause, ResetCause::QueueDeletionFailed { id: 1, .. }), "{cause}");
    // From here on the thread runs again: the command ends when the controller cannot execute it.
    let mut completions = CompletionBatch::with_capacity(8);
    host.target.state().withholds_completions = false;
    while completions.as_slice().is_empty() {
        host.now = host.now.after(POLL);
        host.target.step(host.now);
        queue_pair.poll(host.now, &mut completions);
        let _ = remote.poll(host.now);
    }
    assert_eq!(completions.as_slice()[0].status, IoStatus::ABORTED_BY_HOST);
}
