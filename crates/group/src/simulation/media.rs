//! Media of the ANA groups: a write takes its time, and a fence stops those of one owner.

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::Instant;

/// Media of all groups.
#[derive(Debug, Default)]
pub(super) struct Media {
    media: BTreeMap<u32, Medium>,
    writes: u64,
    ownerships: u64,
}

#[derive(Debug, Default)]
struct Medium {
    /// Writes under way: when they arrive, the name of the owner at the medium, and its term.
    under_way: Vec<(Instant, String, u64)>,
    fenced: BTreeSet<String>,
    /// Term of the last write that has arrived.
    last_term: u64,
}

impl Media {
    /// Begins a write of an owner.
    pub(super) fn begin_write(&mut self, group: u32, arrives: Instant, owner: &str, term: u64) {
        let medium = self.media.entry(group).or_default();
        medium.under_way.push((arrives, owner.to_owned(), term));
    }

    /// Fences these owners: their writes under way fail, and so do later ones.
    pub(super) fn fence(&mut self, group: u32, names: &[String]) {
        let medium = self.media.entry(group).or_default();
        medium.fenced.extend(names.iter().cloned());
    }

    /// Has an owner finished its writes, as a clean close requires?
    pub(super) fn is_idle(&self, group: u32, owner: &str) -> bool {
        self.media
            .get(&group)
            .is_none_or(|medium| medium.under_way.iter().all(|(_, name, _)| name != owner))
    }

    /// Executes the writes that have arrived.
    pub(super) fn execute(&mut self, now: Instant) -> Result<(), String> {
        for (group, medium) in &mut self.media {
            let (mut due, rest): (Vec<_>, Vec<_>) =
                medium.under_way.drain(..).partition(|(at, ..)| *at <= now);
            medium.under_way = rest;
            due.sort();
            for (_, name, term) in due {
                if medium.fenced.contains(&name) {
                    continue;
                }
                if term < medium.last_term {
                    return Err(format!(
                        "group {group}: a write of {name} in term {term} arrives after one of term {}",
                        medium.last_term
                    ));
                }
                self.writes += 1;
                self.ownerships += u64::from(term > medium.last_term);
                medium.last_term = term;
            }
        }
        Ok(())
    }

    pub(super) const fn writes(&self) -> u64 {
        self.writes
    }

    pub(super) const fn ownerships(&self) -> u64 {
        self.ownerships
    }
}
