//! Failover rules: what happens to a request that a path has not completed successfully.
//!
//! | event | decision |
//! |---|---|
//! | status: namespace not accessible on the path (ANA) | not executed: retry on another path at once |
//! | status: Command Interrupted | retry, also on the same path |
//! | status: path error | retry on any path; the path is backed off |
//! | connection lost; idempotent request | late execution has no effect: retry on another path at once |
//! | connection lost; the request changes or sends data | hold until the old controller cannot execute it |
//! | the old controller can no longer execute it | retry on any path |
//!
//! The old controller can no longer execute commands when it has confirmed that it is disabled, when
//! another one has [reset it](super::controller_fencing), or after the time that it needs to detect the loss (two or
//! three keep-alive times) and its Command Quiesce Time.

use tenmil_base::{IoStatus, Operation};
use tenmil_wire::Status;

use super::path_selector::PathAnaState;

/// Decision on a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryDecision {
    /// Deliver it to the submitter.
    Complete,
    /// It was not executed, and the ANA state of the path is at best this.
    RetryElsewhere(PathAnaState),
    /// It was executed, not executed, or executed in part.
    Ambiguous,
    /// Like `Ambiguous`: its controller was reset.
    Aborted,
    /// It was not executed, or not completely, and the same path may be used again.
    Interrupted,
}

/// The decision on a request that completed with `outcome`.
pub(crate) fn retry_decision(outcome: IoStatus) -> RetryDecision {
    let status = Status(outcome.0);
    if outcome == IoStatus::ABORTED_BY_HOST {
        return RetryDecision::Aborted;
    }
    if status.dnr() {
        return RetryDecision::Complete;
    }
    let known = [
        (Status::ANA_INACCESSIBLE, RetryDecision::RetryElsewhere(PathAnaState::Inaccessible)),
        (Status::ANA_PERSISTENT_LOSS, RetryDecision::RetryElsewhere(PathAnaState::PersistentLoss)),
        (Status::ANA_TRANSITION, RetryDecision::RetryElsewhere(PathAnaState::Change)),
        (Status::COMMAND_INTERRUPTED, RetryDecision::Interrupted),
        (Status::INTERNAL_PATH_ERROR, RetryDecision::Ambiguous),
        (Status::CONTROLLER_PATHING_ERROR, RetryDecision::Ambiguous),
        // The status of commands on a queue that has ended.
        (Status::HOST_PATHING_ERROR, RetryDecision::Ambiguous),
    ];
    known
        .iter()
        .find(|(code, _)| status.has_same_code_as(*code))
        .map_or(RetryDecision::Complete, |(_, decision)| *decision)
}

/// Whether a request may be retried elsewhere while the old controller may still execute it.
pub(crate) fn is_idempotent(operation: Operation) -> bool {
    match operation {
        Operation::Read | Operation::Flush | Operation::Verify => true,
        // Its data may still be sent from the socket.
        Operation::Compare => false,
        Operation::Write
        | Operation::Deallocate
        | Operation::WriteZeroes
        | Operation::WriteUncorrectable
        | Operation::Copy
        | Operation::CompareAndWrite => false,
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{IoStatus, Operation};
    use tenmil_wire::Status;

    use super::{RetryDecision, is_idempotent, retry_decision};
    use crate::multipath::path_selector::PathAnaState;

    #[test]
    fn only_statuses_that_deny_execution_permit_immediate_retry() {
        for (status, expected) in [
            (Status::SUCCESS, RetryDecision::Complete),
            (Status::INVALID_FIELD, RetryDecision::Complete),
            (Status::ANA_INACCESSIBLE, RetryDecision::RetryElsewhere(PathAnaState::Inaccessible)),
            (
                Status::ANA_PERSISTENT_LOSS,
                RetryDecision::RetryElsewhere(PathAnaState::PersistentLoss),
            ),
            (Status::ANA_TRANSITION, RetryDecision::RetryElsewhere(PathAnaState::Change)),
            (Status::ANA_TRANSITION.with_dnr(), RetryDecision::Complete),
            (Status::INTERNAL_PATH_ERROR, RetryDecision::Ambiguous),
            (Status::INTERNAL_PATH_ERROR.with_dnr(), RetryDecision::Complete),
            (Status::ABORTED_BY_HOST, RetryDecision::Aborted),
            (Status::COMMAND_INTERRUPTED, RetryDecision::Interrupted),
            (Status::COMMAND_INTERRUPTED.with_dnr(), RetryDecision::Complete),
            (Status::HOST_PATHING_ERROR, RetryDecision::Ambiguous),
        ] {
            assert_eq!(retry_decision(IoStatus(status.0)), expected, "{status}");
        }
    }

    #[test]
    fn idempotent_operations_are_read_flush_and_verify() {
        let idempotent: Vec<_> =
            Operation::ALL.into_iter().filter(|it| is_idempotent(*it)).collect();
        assert_eq!(idempotent, [Operation::Read, Operation::Flush, Operation::Verify]);
    }
}
