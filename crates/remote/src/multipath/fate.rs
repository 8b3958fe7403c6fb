//! What becomes of a request that a path has not done. Nothing but the rule:
//!
//! | what has happened | what it is worth |
//! |---|---|
//! | answered: the path does not lead there (ANA) | it was not done: another path may have it at once |
//! | answered: it was interrupted | it may be done again, by the same path as well |
//! | answered: something went wrong on the path | it may be done again, by whoever; the path rests a while |
//! | the connection is gone, and it only looks | nothing can change by its being done late: another path may have it at once |
//! | the connection is gone, and it changes or sends something | it waits until the old controller can do nothing of it any more |
//! | the old controller can do nothing any more | it may be done again, by whoever |
//!
//! The old controller can do nothing any more when it has said that it is disabled, when another one has
//! [reset it](super::fence), or when it has had the time that it needs to miss us (two keep-alive times,
//! or three) and its command quiesce time to come to rest.

use base::{Operation, Outcome};
use wire::Status;

use super::route::Access;

/// What an answer is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Whoever asked gets it.
    Told,
    /// It was not done, and the path leads to the namespace no better than this.
    NotDone(Access),
    /// It was done, or not, or in part.
    Unclear,
    /// As `Unclear`: its controller has been reset.
    Ended,
    /// It was not done, or not whole, and the same path may have it again.
    Interrupted,
}

/// What becomes of a request that was answered with `outcome`.
pub(crate) fn of_answer(outcome: Outcome) -> Fate {
    let status = Status(outcome.0);
    if outcome == Outcome::ABORTED_BY_HOST {
        return Fate::Ended;
    }
    if status.dnr() {
        return Fate::Told;
    }
    let known = [
        (Status::ANA_INACCESSIBLE, Fate::NotDone(Access::Inaccessible)),
        (Status::ANA_PERSISTENT_LOSS, Fate::NotDone(Access::PersistentLoss)),
        (Status::ANA_TRANSITION, Fate::NotDone(Access::Change)),
        (Status::COMMAND_INTERRUPTED, Fate::Interrupted),
        (Status::INTERNAL_PATH_ERROR, Fate::Unclear),
        (Status::CONTROLLER_PATHING_ERROR, Fate::Unclear),
        // What a queue answers that has ended.
        (Status::HOST_PATHING_ERROR, Fate::Unclear),
    ];
    known.iter().find(|(code, _)| status.is(*code)).map_or(Fate::Told, |(_, fate)| *fate)
}

/// Whether a request may go elsewhere while nobody knows whether the old controller still does it.
pub(crate) fn only_looks(operation: Operation) -> bool {
    match operation {
        Operation::Read | Operation::Flush | Operation::Verify => true,
        // Its bytes may still leave the socket.
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
    use base::{Operation, Outcome};
    use wire::Status;

    use super::{Fate, of_answer, only_looks};
    use crate::multipath::route::Access;

    #[test]
    fn only_what_says_that_it_was_not_done_is_believed_to_be_undone() {
        for (status, expected) in [
            (Status::SUCCESS, Fate::Told),
            (Status::INVALID_FIELD, Fate::Told),
            (Status::ANA_INACCESSIBLE, Fate::NotDone(Access::Inaccessible)),
            (Status::ANA_PERSISTENT_LOSS, Fate::NotDone(Access::PersistentLoss)),
            (Status::ANA_TRANSITION, Fate::NotDone(Access::Change)),
            (Status::ANA_TRANSITION.with_dnr(), Fate::Told),
            (Status::INTERNAL_PATH_ERROR, Fate::Unclear),
            (Status::INTERNAL_PATH_ERROR.with_dnr(), Fate::Told),
            (Status::ABORTED_BY_HOST, Fate::Ended),
            (Status::COMMAND_INTERRUPTED, Fate::Interrupted),
            (Status::COMMAND_INTERRUPTED.with_dnr(), Fate::Told),
            (Status::HOST_PATHING_ERROR, Fate::Unclear),
        ] {
            assert_eq!(of_answer(Outcome(status.0)), expected, "{status}");
        }
    }

    #[test]
    fn nothing_that_changes_or_sends_a_block_goes_elsewhere_before_its_time() {
        let looks: Vec<_> = Operation::ALL.into_iter().filter(|it| only_looks(*it)).collect();
        assert_eq!(looks, [Operation::Read, Operation::Flush, Operation::Verify]);
    }
}
