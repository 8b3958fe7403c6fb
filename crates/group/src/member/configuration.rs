//! Configuration that all members share: compared when a member joins, and changed by compare-and-swap.
//!
//! The first member of a group that no other is in defines the configuration. A member that starts while others are there
//! must have theirs; one that has been a member before adopts it, as all do after a change.

use tenmil_base::Instant;

use super::{Action, Member, MemberState, REFUSE};
use crate::records::CONFIGURATION_KEY;
use crate::store::{Put, Snapshot, Transaction};

/// Shared configuration as a member knows it.
#[derive(Debug)]
pub(super) struct SharedConfiguration {
    /// Configuration of this member.
    own: String,
    /// Whether this process has been a member.
    has_joined: bool,
    /// Configuration of the group that differs, if this member cannot join with its own.
    differing: Option<String>,
    /// Configuration that is being applied.
    offered: Option<String>,
    /// When a configuration that could not be applied is tried again.
    offer_at: Instant,
    /// Change of this member that the map does not have yet.
    proposal: Option<Proposal>,
    outcome: Option<ProposalOutcome>,
}

/// A change of the shared configuration.
#[derive(Debug)]
struct Proposal {
    /// Configuration that it changes.
    base: String,
    configuration: String,
}

/// What has become of a change of the shared configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProposalOutcome {
    /// The group has it.
    Adopted,
    /// Another member has changed the configuration since.
    Conflict,
    /// This process is no member of the group.
    NotMember,
}

impl SharedConfiguration {
    pub(super) const fn new(own: String) -> Self {
        Self {
            own,
            has_joined: false,
            differing: None,
            offered: None,
            offer_at: Instant { ns: 0 },
            proposal: None,
            outcome: None,
        }
    }

    pub(super) const fn handle_joined(&mut self) {
        self.has_joined = true;
    }

    /// The entry of the map, unless it has this configuration.
    pub(super) fn put_unless_written(&self, snapshot: &Snapshot) -> Option<Put> {
        (configuration_of(snapshot) != Some(&self.own)).then(|| put(&self.own))
    }

    /// The lease is lost: whether a transaction that was sent is executed is not known.
    pub(super) fn abandon_proposal(&mut self) {
        if self.proposal.take().is_some() {
            self.outcome = Some(ProposalOutcome::NotMember);
        }
    }
}

impl Member {
    /// Configuration of the group, if it differs from that with which this process was started.
    #[must_use]
    pub fn differing_configuration(&self) -> Option<&str> {
        self.shared.differing.as_deref()
    }

    /// Changes the shared configuration. [`take_proposal_outcome`](Self::take_proposal_outcome) returns what has become
    /// of it.
    pub fn propose_configuration(&mut self, now: Instant, configuration: String) {
        self.shared.outcome = None;
        if self.state != MemberState::Joined {
            self.shared.outcome = Some(ProposalOutcome::NotMember);
            return;
        }
        self.shared.proposal = Some(Proposal { base: self.shared.own.clone(), configuration });
        self.handle_change(now);
    }

    /// What has become of the last change, once that is known.
    pub fn take_proposal_outcome(&mut self) -> Option<ProposalOutcome> {
        self.shared.outcome.take()
    }

    /// Gives up a change whose outcome is not known. It may have been executed; then it is offered as one of another member.
    pub fn cancel_proposal(&mut self) {
        self.shared.proposal = None;
    }

    /// A configuration of the group is applied, or cannot be.
    pub fn handle_configured(&mut self, now: Instant, configuration: String, is_applied: bool) {
        if self.shared.offered.as_ref() == Some(&configuration) {
            self.shared.offered = None;
        }
        match is_applied {
            true => self.shared.own = configuration,
            false => self.shared.offer_at = now.after(REFUSE),
        }
        self.handle_change(now);
    }

    /// Whether this member may join with its configuration.
    pub(super) fn agrees_with_group(&mut self, now: Instant, is_alone: bool) -> bool {
        let found = configuration_of(&self.snapshot).cloned();
        let shared = &mut self.shared;
        let found = found.filter(|found| *found != shared.own);
        shared.differing = None;
        match found {
            None => true,
            Some(found) if shared.has_joined => {
                self.offer(now, found);
                false
            }
            Some(_) if is_alone => true,
            Some(found) => {
                shared.differing = Some(found);
                false
            }
        }
    }

    /// Compares the configuration of the map with that of this member, and adds a change of this member.
    pub(super) fn evaluate_configuration(&mut self, now: Instant, transaction: &mut Transaction) {
        let found = configuration_of(&self.snapshot).cloned();
        if let Some(Proposal { base, configuration }) = &self.shared.proposal {
            if found.as_ref() == Some(configuration) {
                self.shared.own.clone_from(configuration);
                self.shared.outcome = Some(ProposalOutcome::Adopted);
            } else if found.as_ref() != Some(base) {
                self.shared.outcome = Some(ProposalOutcome::Conflict);
            } else {
                let change = put(configuration);
                transaction.conditions.push(self.unchanged(CONFIGURATION_KEY));
                transaction.puts.push(change);
                return;
            }
            self.shared.proposal = None;
        }
        match found {
            None => {
                transaction.conditions.push(self.unchanged(CONFIGURATION_KEY));
                transaction.puts.push(put(&self.shared.own));
            }
            Some(found) if found != self.shared.own => self.offer(now, found),
            Some(_) => {}
        }
    }

    /// Has the target apply a configuration of the group.
    fn offer(&mut self, now: Instant, configuration: String) {
        let shared = &mut self.shared;
        if shared.offered.as_ref() == Some(&configuration) || now < shared.offer_at {
            return;
        }
        shared.offered = Some(configuration.clone());
        self.actions.push_back(Action::Configure { configuration });
    }
}

fn configuration_of(snapshot: &Snapshot) -> Option<&String> {
    snapshot.entries.get(CONFIGURATION_KEY).map(|entry| &entry.value)
}

fn put(configuration: &str) -> Put {
    Put { key: CONFIGURATION_KEY.to_owned(), value: configuration.to_owned(), lease: None }
}
