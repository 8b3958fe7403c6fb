//! Finding out which namespaces there are, one Identify at a time.
//!
//! ```text
//!   active list (1024 at a time) --> for each that is new or changed:
//!       names and command set (CNS 03h) --> the namespace (CNS 00h) --> its guards (CNS 05h)
//! ```
//!
//! It does no I/O: [`Scan::question`] is asked, and the answer goes to [`Scan::handle`].

use std::collections::{BTreeMap, BTreeSet};

use wire::identify::{
    BYTES, Cns, CommandSet, IdentifyNamespace, IdentifyNamespaceNvm, NSID_MAX, NamespaceIdentifier,
    NamespaceList, descriptors,
};
use wire::register::Version;
use wire::{Status, admin};

use crate::error::Lie;
use crate::event::{Event, Unusable};
use crate::namespace::{Namespace, command_set_of};

/// A search for namespaces.
#[derive(Debug)]
pub(super) struct Scan {
    manner: Manner,
    /// Namespaces of which everything is known and nothing has changed.
    kept: BTreeSet<u32>,
    active: Vec<u32>,
    ignored: u32,
    found: BTreeMap<u32, Result<Namespace, Unusable>>,
    step: Step,
}

/// What the controller can be asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    pub(super) version: Version,
    /// The highest identifier there can be (Identify Controller: NN).
    pub(super) highest: u32,
    pub(super) namespaces_max: u32,
    /// There is a page of the NVM command set for each namespace.
    pub(super) has_nvm_page: bool,
}

/// Why the list itself was of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanError {
    Lie(Lie),
    Refused(Status),
}

/// Named after what is awaited. `at` counts in `active`.
#[derive(Debug)]
enum Step {
    List { after: u32 },
    Names { at: usize },
    Common { at: usize, names: Vec<NamespaceIdentifier> },
    Nvm { at: usize, names: Vec<NamespaceIdentifier>, common: Box<IdentifyNamespace> },
    Done,
}

/// The first versions with a list of namespaces (Base 1.1) and with their names (Base 1.3).
const LISTS_SINCE: Version = Version(0x0001_0100);
const NAMES_SINCE: Version = Version(0x0001_0300);

impl Scan {
    /// A search that asks again about everything but `kept`.
    pub(super) fn new(manner: Manner, kept: BTreeSet<u32>) -> Self {
        let mut scan = Self {
            manner,
            kept,
            active: Vec::new(),
            ignored: 0,
            found: BTreeMap::new(),
            step: Step::List { after: 0 },
        };
        if manner.version < LISTS_SINCE {
            // The highest identifier is whatever the controller says, four billion included.
            let most = manner.highest.min(manner.namespaces_max);
            (1..=most).for_each(|id| scan.add(id));
            scan.ignored = manner.highest - most;
            scan.step = scan.first_step_at(0);
        }
        scan
    }

    /// What to ask next; `None` when all is known.
    pub(super) fn question(&self) -> Option<admin::Identify> {
        let (cns, nsid) = match &self.step {
            Step::List { after } => (Cns::ActiveNamespaces, *after),
            Step::Names { at } => (Cns::Descriptors, self.active[*at]),
            Step::Common { at, .. } => (Cns::Namespace, self.active[*at]),
            Step::Nvm { at, .. } => (Cns::CommandSetNamespace, self.active[*at]),
            Step::Done => return None,
        };
        let csi = CommandSet::Nvm.code();
        Some(admin::Identify { nsid, cns: cns.code(), csi, ..admin::Identify::default() })
    }

    /// What the controller said.
    pub(super) fn handle(&mut self, status: Status, page: &[u8; BYTES]) -> Result<(), ScanError> {
        self.step = match core::mem::replace(&mut self.step, Step::Done) {
            Step::List { after } if status.is_success() => self.on_list(after, page)?,
            Step::List { .. } => return Err(ScanError::Refused(status)),
            Step::Names { at } => self.on_names(at, status, page),
            Step::Common { at, names } => self.on_common(at, names, status, page),
            Step::Nvm { at, names, common } => {
                let nvm = IdentifyNamespaceNvm::from_bytes(page);
                let nvm = Some(&nvm).filter(|_| status.is_success());
                self.conclude(at, Namespace::check(self.active[at], &common, nvm, &names))
            }
            Step::Done => unreachable!("nothing was asked"),
        };
        Ok(())
    }

    fn on_list(&mut self, after: u32, page: &[u8; BYTES]) -> Result<Step, ScanError> {
        let lie = |found: u32, expected| {
            let field = "active namespace list";
            ScanError::Lie(Lie { field, found: found.into(), expected })
        };
        let (mut last, mut count) = (after, 0);
        for id in NamespaceList::from_bytes(page).iter() {
            if id <= last {
                return Err(lie(id, "identifiers that rise"));
            }
            if id > self.manner.highest.min(NSID_MAX) {
                return Err(lie(id, "at most NN"));
            }
            self.add(id);
            (last, count) = (id, count + 1);
        }
        let may_go_on = count == NamespaceList::CAPACITY && last < self.manner.highest;
        if may_go_on && self.ignored == 0 {
            return Ok(Step::List { after: last });
        }
        Ok(self.first_step_at(0))
    }

    fn add(&mut self, id: u32) {
        if self.active.len() < self.manner.namespaces_max as usize {
            self.active.push(id);
        } else {
            self.ignored += 1;
        }
    }

    /// The first question about the next namespace from `at` on of which something is to be asked.
    fn first_step_at(&self, at: usize) -> Step {
        match (at..self.active.len()).find(|at| !self.kept.contains(&self.active[*at])) {
            None => Step::Done,
            Some(at) if self.manner.version >= NAMES_SINCE => Step::Names { at },
            Some(at) => Step::Common { at, names: Vec::new() },
        }
    }

    /// A controller without names for its namespaces is no worse for that.
    fn on_names(&mut self, at: usize, status: Status, page: &[u8; BYTES]) -> Step {
        let names: Vec<_> = match status.is_success() {
            true => descriptors(page).collect(),
            false => Vec::new(),
        };
        match command_set_of(&names) {
            CommandSet::Nvm => Step::Common { at, names },
            other => self.set_aside(at, Unusable::CommandSet(other)),
        }
    }

    fn on_common(
        &mut self,
        at: usize,
        names: Vec<NamespaceIdentifier>,
        status: Status,
        page: &[u8; BYTES],
    ) -> Step {
        let common = IdentifyNamespace::from_bytes(page);
        // Between the list and this question it may have gone: then there is nothing to tell.
        let has_gone = status.is(Status::INVALID_NAMESPACE_OR_FORMAT)
            || status.is_success() && common.nsze() == 0;
        if has_gone {
            return self.first_step_at(at + 1);
        }
        if !status.is_success() {
            return self.set_aside(at, Unusable::Refused(status));
        }
        if common.pit() != 0 && self.manner.has_nvm_page {
            return Step::Nvm { at, names, common: Box::new(common) };
        }
        self.conclude(at, Namespace::check(self.active[at], &common, None, &names))
    }

    fn conclude(&mut self, at: usize, checked: Result<Namespace, Lie>) -> Step {
        match checked {
            Ok(namespace) => {
                self.found.insert(self.active[at], Ok(namespace));
                self.first_step_at(at + 1)
            }
            Err(lie) => self.set_aside(at, Unusable::Lie(lie)),
        }
    }

    fn set_aside(&mut self, at: usize, why: Unusable) -> Step {
        self.found.insert(self.active[at], Err(why));
        self.first_step_at(at + 1)
    }

    /// Brings `known` up to date and returns what is to be told about it.
    pub(super) fn finish(mut self, known: &mut BTreeMap<u32, Namespace>) -> Vec<Event> {
        let kept = &self.kept;
        let active: BTreeSet<u32> = self.active.iter().copied().collect();
        let stays = |id: &u32| active.contains(id) && kept.contains(id);
        let is_usable = |id: &u32| matches!(self.found.get(id), Some(Ok(_)));
        let gone: BTreeSet<u32> =
            known.keys().copied().filter(|id| !stays(id) && !is_usable(id)).collect();
        let mut events: Vec<Event> =
            gone.iter().map(|id| Event::NamespaceDetached { id: *id }).collect();
        known.retain(|id, _| !gone.contains(id));
        for (id, found) in core::mem::take(&mut self.found) {
            events.extend(match found {
                Ok(namespace) => difference(known.insert(id, namespace.clone()), &namespace),
                Err(why) => Some(Event::NamespaceUnusable { id, why }),
            });
        }
        if self.ignored > 0 {
            events.push(Event::NamespacesIgnored { count: self.ignored });
        }
        events
    }
}

fn difference(before: Option<Namespace>, after: &Namespace) -> Option<Event> {
    let id = after.id;
    match before {
        None => Some(Event::NamespaceAttached { id }),
        Some(before) if before == *after => None,
        Some(before)
            if before.block_count != after.block_count && before.is_same_but_for_size(after) =>
        {
            let (from_blocks, to_blocks) = (before.block_count, after.block_count);
            Some(Event::NamespaceResized { id, from_blocks, to_blocks })
        }
        Some(_) => Some(Event::NamespaceChanged { id }),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use wire::Status;
    use wire::identify::namespace::LbaFormat;
    use wire::identify::{
        BYTES, CommandSet, IdentifyNamespace, NamespaceIdentifier, NamespaceList,
        descriptor::descriptor_list,
    };
    use wire::register::Version;

    use super::{Manner, Scan, ScanError};
    use crate::event::{Event, Unusable};
    use crate::namespace::Namespace;

    const MANNER: Manner = Manner {
        version: Version(0x0001_0400),
        highest: 3000,
        namespaces_max: 3000,
        has_nvm_page: false,
    };

    /// What the controller has: blocks and command set by identifier.
    type Truth = BTreeMap<u32, (u64, CommandSet)>;

    fn truth(ids: impl IntoIterator<Item = u32>) -> Truth {
        ids.into_iter().map(|id| (id, (1000, CommandSet::Nvm))).collect()
    }

    fn answer(truth: &Truth, cns: u8, id: u32) -> (Status, [u8; BYTES]) {
        let page = match (cns, truth.get(&id)) {
            (2, _) => {
                *NamespaceList::new(truth.keys().copied().filter(|other| *other > id)).as_bytes()
            }
            (3, Some((_, set))) => descriptor_list(&[NamespaceIdentifier::Csi(*set)]),
            (0, Some((blocks, _))) => *IdentifyNamespace::zeroed()
                .with(|id| id.nsze(*blocks).ncap(*blocks).lbaf(0, LbaFormat::new(9, 0)))
                .as_bytes(),
            _ => return (Status::INVALID_NAMESPACE_OR_FORMAT, [0; BYTES]),
        };
        (Status::SUCCESS, page)
    }

    /// Runs a scan to its end: the events, and how many questions it took.
    fn run(
        manner: Manner,
        truth: &Truth,
        known: &mut BTreeMap<u32, Namespace>,
        kept: BTreeSet<u32>,
    ) -> (Result<Vec<Event>, ScanError>, u32) {
        let mut scan = Scan::new(manner, kept);
        let mut questions = 0;
        while let Some(question) = scan.question() {
            questions += 1;
            let (status, page) = answer(truth, question.cns, question.nsid);
            if let Err(error) = scan.handle(status, &page) {
                return (Err(error), questions);
            }
        }
        (Ok(scan.finish(known)), questions)
    }

    fn all(manner: Manner, truth: &Truth, known: &mut BTreeMap<u32, Namespace>) -> Vec<Event> {
        run(manner, truth, known, BTreeSet::new()).0.unwrap()
    }

    #[test]
    fn lists_longer_than_a_page_are_read_to_their_end() {
        for count in [0, 1, 1023, 1024, 1025, 2048, 2049] {
            let mut known = BTreeMap::new();
            let events = all(MANNER, &truth(1..=count), &mut known);
            assert_eq!(events.len(), count as usize);
            assert!(known.keys().copied().eq(1..=count));
        }
    }

    #[test]
    fn what_changed_is_told_as_what_it_is() {
        let mut known = BTreeMap::new();
        let mut now = truth([1, 2, 3]);
        all(MANNER, &now, &mut known);
        assert_eq!(all(MANNER, &now, &mut known), [], "nothing changed");
        now.remove(&1);
        now.insert(2, (500, CommandSet::Nvm));
        now.insert(9, (1000, CommandSet::Nvm));
        now.insert(3, (1000, CommandSet::Zoned));
        let expected = [
            Event::NamespaceDetached { id: 1 },
            Event::NamespaceDetached { id: 3 },
            Event::NamespaceResized { id: 2, from_blocks: 1000, to_blocks: 500 },
            Event::NamespaceUnusable { id: 3, why: Unusable::CommandSet(CommandSet::Zoned) },
            Event::NamespaceAttached { id: 9 },
        ];
        assert_eq!(all(MANNER, &now, &mut known), expected);
        assert!(known.keys().copied().eq([2, 9]));
    }

    #[test]
    fn only_what_may_have_changed_is_asked_about_again() {
        let mut known = BTreeMap::new();
        let mut now = truth(1..=100);
        all(MANNER, &now, &mut known);
        now.remove(&50);
        let kept = (1..=100).filter(|id| *id != 7).collect();
        let (events, questions) = run(MANNER, &now, &mut known, kept);
        assert_eq!(events.unwrap(), [Event::NamespaceDetached { id: 50 }]);
        assert_eq!(questions, 3, "the list, and two about namespace 7");
        assert_eq!(known.len(), 99);
    }

    #[test]
    fn more_namespaces_than_are_kept_track_of_are_counted_and_left_out() {
        let few = Manner { namespaces_max: 3, ..MANNER };
        let mut known = BTreeMap::new();
        let events = all(few, &truth(1..=5), &mut known);
        assert_eq!(events.last(), Some(&Event::NamespacesIgnored { count: 2 }));
        assert_eq!(known.len(), 3);
    }

    #[test]
    fn a_list_that_does_not_rise_or_names_too_much_is_refused() {
        for (list, found) in [(vec![1, 1], 1), (vec![5, 4], 4), (vec![3001], 3001)] {
            let mut scan = Scan::new(MANNER, BTreeSet::new());
            let page = NamespaceList::new(list);
            match scan.handle(Status::SUCCESS, page.as_bytes()) {
                Err(ScanError::Lie(lie)) => assert_eq!(lie.found, found),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_list_that_repeats_its_page_cannot_keep_us_for_ever() {
        let mut scan = Scan::new(MANNER, BTreeSet::new());
        let page = NamespaceList::new(1..=1024);
        assert_eq!(scan.handle(Status::SUCCESS, page.as_bytes()), Ok(()));
        assert!(scan.handle(Status::SUCCESS, page.as_bytes()).is_err());
    }

    #[test]
    fn a_controller_from_before_lists_is_asked_about_every_identifier() {
        let old = Manner { version: Version(0x0001_0000), highest: 4, ..MANNER };
        let mut known = BTreeMap::new();
        let (events, questions) = run(old, &truth([1, 3]), &mut known, BTreeSet::new());
        assert_eq!(events.unwrap().len(), 2);
        assert_eq!(questions, 4);
    }

    #[test]
    fn one_namespace_of_nonsense_does_not_take_the_others_with_it() {
        let mut known = BTreeMap::new();
        let mut now = truth([1, 2]);
        now.insert(1, (1 << 60, CommandSet::Nvm));
        let events = all(MANNER, &now, &mut known);
        assert!(matches!(
            events[..],
            [
                Event::NamespaceUnusable { id: 1, why: Unusable::Lie(_) },
                Event::NamespaceAttached { id: 2 }
            ]
        ));
    }

    #[test]
    fn a_controller_without_a_list_may_claim_four_billion_namespaces() {
        let oldest = Version(0x0001_0000);
        let manner = Manner { version: oldest, highest: u32::MAX, namespaces_max: 8, ..MANNER };
        let (events, questions) =
            run(manner, &truth([1, 3]), &mut BTreeMap::new(), BTreeSet::new());
        let attached = |id| Event::NamespaceAttached { id };
        let ignored = Event::NamespacesIgnored { count: u32::MAX - 8 };
        assert_eq!(events.unwrap(), [attached(1), attached(3), ignored]);
        assert_eq!(questions, 8);
    }
}
