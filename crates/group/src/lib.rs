//! Group of gateways: which of several target processes owns which ANA group.
//!
//! ```text
//!   store: etcd, memory ◀── operations ── Member ── actions ──▶ target: fence, open, activate, close
//!          leases, compare-and-swap ── replies ──▶  │
//!                                                   └─ serving_until ──▶ I/O path: one word
//! ```
//!
//! The members share a [map](records) of keys with revisions. A [`Member`] holds its entry by a lease, and
//! stops by [its own clock](lease) before the lease can end in the store. An ANA group has one owner, which is
//! changed by compare-and-swap only, and only when the lease of the owner before has ended or that owner has
//! released the group. The new owner has the medium fenced before it opens it.
//!
//! Nothing here does I/O or reads a clock: [`Store`] is implemented elsewhere, and once in
//! [memory](MemoryStore) for the [simulation].

#![forbid(unsafe_code)]

mod assignment;
mod lease;
mod member;
mod memory_store;
pub mod records;
pub mod simulation;
mod store;
mod store_conformance;

pub use lease::LeaseTiming;
pub use member::{
    Action, GroupPhase, InjectedBug, Member, MemberConfig, MemberState, MemberStatus, OpenedGroup,
    OperationId, ProposalOutcome,
};
pub use memory_store::MemoryStore;
pub use store::{
    Condition, Entry, LeaseId, Put, Snapshot, Store, StoreOperation, StoreReply, Transaction,
};
pub use store_conformance::check_store;
