//! Namespace discovery, one Identify command at a time.
//!
//! ```text
//!   active list (1024 at a time) --> for each that is new or changed:
//!       identifiers and command set (CNS 03h) --> the namespace (CNS 00h) --> its guards (CNS 05h)
//! ```
//!
//! The scan performs no I/O: [`NamespaceScan::next_identify`] is sent, and its result passed to [`NamespaceScan::handle_result`].

use std::collections::{BTreeMap, BTreeSet};

use tenmil_wire::identify::{
    BYTES, Cns, CommandSet, IdentifyNamespace, IdentifyNamespaceNvm, NSID_MAX, NamespaceIdentifier,
    NamespaceList, namespace_identifiers,
};
use tenmil_wire::register::Version;
use tenmil_wire::{Status, admin};

use crate::error::InvalidValue;
use crate::event::{Event, NamespaceError};
use crate::namespace::{Namespace, command_set_of};

/// Namespace scan in progress.
#[derive(Debug)]
pub(super) struct NamespaceScan {
    manner: ScanCapabilities,
    /// Namespaces that are known and unchanged.
    kept: BTreeSet<u32>,
    active: Vec<u32>,
    ignored: u32,
    found: BTreeMap<u32, Result<Namespace, NamespaceError>>,
    step: ScanStep,
}

/// Identify pages that may be used.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScanCapabilities {
    pub(super) version: Version,
    /// Highest valid identifier (Identify Controller: NN).
    pub(super) highest: u32,
    pub(super) namespaces_max: u32,
    /// The NVM command set page exists for each namespace.
    pub(super) has_nvm_page: bool,
}

/// Reason why the namespace list cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanError {
    Lie(InvalidValue),
    Refused(Status),
}

/// Steps of a scan, named for the awaited data. `at` is an index into `active`.
#[derive(Debug)]
enum ScanStep {
    List { after: u32 },
    Names { at: usize },
    Common { at: usize, names: Vec<NamespaceIdentifier> },
    Nvm { at: usize, names: Vec<NamespaceIdentifier>, common: Box<IdentifyNamespace> },
    Done,
}

/// First versions with a namespace list (Base 1.1) and with identification descriptors (Base 1.3).
const LISTS_SINCE: Version = Version(0x0001_0100);
const NAMES_SINCE: Version = Version(0x0001_0300);

impl NamespaceScan {
    /// Starts a scan that reads everything except the namespaces in `kept`.
    pub(super) fn new(manner: ScanCapabilities, kept: BTreeSet<u32>) -> Self {
        let mut scan = Self {
            manner,
            kept,
            active: Vec::new(),
            ignored: 0,
            found: BTreeMap::new(),
            step: ScanStep::List { after: 0 },
        };
        if manner.version < LISTS_SINCE {
            // The reported highest identifier may be any value, up to four billion.
            let most = manner.highest.min(manner.namespaces_max);
            (1..=most).for_each(|id| scan.add_active_nsid(id));
            scan.ignored = manner.highest - most;
            scan.step = scan.first_step_at(0);
        }
        scan
    }

    /// Next Identify command; `None` when the scan is complete.
    pub(super) fn next_identify(&self) -> Option<admin::Identify> {
        let (cns, nsid) = match &self.step {
            ScanStep::List { after } => (Cns::ActiveNamespaces, *after),
            ScanStep::Names { at } => (Cns::Descriptors, self.active[*at]),
            ScanStep::Common { at, .. } => (Cns::Namespace, self.active[*at]),
            ScanStep::Nvm { at, .. } => (Cns::CommandSetNamespace, self.active[*at]),
            ScanStep::Done => return None,
        };
        let csi = CommandSet::Nvm.code();
        Some(admin::Identify { nsid, cns: cns.code(), csi, ..admin::Identify::default() })
    }

    /// Handles the result of the last command.
    pub(super) fn handle_result(
        &mut self,
        status: Status,
        page: &[u8; BYTES],
    ) -> Result<(), ScanError> {
        self.step = match core::mem::replace(&mut self.step, ScanStep::Done) {
            ScanStep::List { after } if status.is_success() => self.on_list(after, page)?,
            ScanStep::List { .. } => return Err(ScanError::Refused(status)),
            ScanStep::Names { at } => self.on_descriptors(at, status, page),
            ScanStep::Common { at, names } => self.on_identify_namespace(at, names, status, page),
            ScanStep::Nvm { at, names, common } => {
                let nvm = IdentifyNamespaceNvm::from_bytes(page);
                let nvm = Some(&nvm).filter(|_| status.is_success());
                self.record_result(
                    at,
                    Namespace::from_identify(self.active[at], &common, nvm, &names),
                )
            }
            ScanStep::Done => unreachable!("nothing was asked"),
        };
        Ok(())
    }

    fn on_list(&mut self, after: u32, page: &[u8; BYTES]) -> Result<ScanStep, ScanError> {
        let lie = |found: u32, expected| {
            let field = "active namespace list";
            ScanError::Lie(InvalidValue { field, found: found.into(), expected })
        };
        let (mut last, mut count) = (after, 0);
        for id in NamespaceList::from_bytes(page).iter() {
            if id <= last {
                return Err(lie(id, "identifiers that rise"));
            }
            if id > self.manner.highest.min(NSID_MAX) {
                return Err(lie(id, "at most NN"));
            }
            self.add_active_nsid(id);
            (last, count) = (id, count + 1);
        }
        let may_go_on = count == NamespaceList::CAPACITY && last < self.manner.highest;
        if may_go_on && self.ignored == 0 {
            return Ok(ScanStep::List { after: last });
        }
        Ok(self.first_step_at(0))
    }

    fn add_active_nsid(&mut self, id: u32) {
        if self.active.len() < self.manner.namespaces_max as usize {
            self.active.push(id);
        } else {
            self.ignored += 1;
        }
    }

    /// First step for the next namespace, from `at` on, that has to be read.
    fn first_step_at(&self, at: usize) -> ScanStep {
        match (at..self.active.len()).find(|at| !self.kept.contains(&self.active[*at])) {
            None => ScanStep::Done,
            Some(at) if self.manner.version >= NAMES_SINCE => ScanStep::Names { at },
            Some(at) => ScanStep::Common { at, names: Vec::new() },
        }
    }

    /// Handles the descriptors; a controller without them is accepted.
    fn on_descriptors(&mut self, at: usize, status: Status, page: &[u8; BYTES]) -> ScanStep {
        let names: Vec<_> = match status.is_success() {
            true => namespace_identifiers(page).collect(),
            false => Vec::new(),
        };
        match command_set_of(&names) {
            CommandSet::Nvm => ScanStep::Common { at, names },
            other => self.record_error(at, NamespaceError::CommandSet(other)),
        }
    }

    fn on_identify_namespace(
        &mut self,
        at: usize,
        names: Vec<NamespaceIdentifier>,
        status: Status,
        page: &[u8; BYTES],
    ) -> ScanStep {
        let common = IdentifyNamespace::from_bytes(page);
        // The namespace may have been deleted after the list was read; that is not an error.
        let has_gone = status.has_same_code_as(Status::INVALID_NAMESPACE_OR_FORMAT)
            || status.is_success() && common.nsze() == 0;
        if has_gone {
            return self.first_step_at(at + 1);
        }
        if !status.is_success() {
            return self.record_error(at, NamespaceError::IdentifyFailed(status));
        }
        if common.pit() != 0 && self.manner.has_nvm_page {
            return ScanStep::Nvm { at, names, common: Box::new(common) };
        }
        self.record_result(at, Namespace::from_identify(self.active[at], &common, None, &names))
    }

    fn record_result(&mut self, at: usize, checked: Result<Namespace, InvalidValue>) -> ScanStep {
        match checked {
            Ok(namespace) => {
                self.found.insert(self.active[at], Ok(namespace));
                self.first_step_at(at + 1)
            }
            Err(lie) => self.record_error(at, NamespaceError::InvalidData(lie)),
        }
    }

    fn record_error(&mut self, at: usize, why: NamespaceError) -> ScanStep {
        self.found.insert(self.active[at], Err(why));
        self.first_step_at(at + 1)
    }

    /// Updates `known` and returns the resulting events.
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
                Ok(namespace) => {
                    namespace_change_event(known.insert(id, namespace.clone()), &namespace)
                }
                Err(why) => Some(Event::NamespaceUnusable { id, why }),
            });
        }
        if self.ignored > 0 {
            events.push(Event::NamespacesIgnored { count: self.ignored });
        }
        events
    }
}

fn namespace_change_event(before: Option<Namespace>, after: &Namespace) -> Option<Event> {
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

    use tenmil_wire::Status;
    use tenmil_wire::identify::namespace::LbaFormat;
    use tenmil_wire::identify::{
        BYTES, CommandSet, IdentifyNamespace, NamespaceIdentifier, NamespaceList,
        namespace_identification_descriptor::build_descriptor_list,
    };
    use tenmil_wire::register::Version;

    use super::{NamespaceScan, ScanCapabilities, ScanError};
    use crate::event::{Event, NamespaceError};
    use crate::namespace::Namespace;

    const MANNER: ScanCapabilities = ScanCapabilities {
        version: Version(0x0001_0400),
        highest: 3000,
        namespaces_max: 3000,
        has_nvm_page: false,
    };

    /// Namespaces of the controller: blocks and command set by identifier.
    type Truth = BTreeMap<u32, (u64, CommandSet)>;

    fn scripted_namespaces(ids: impl IntoIterator<Item = u32>) -> Truth {
        ids.into_iter().map(|id| (id, (1000, CommandSet::Nvm))).collect()
    }

    fn identify_answer(truth: &Truth, cns: u8, id: u32) -> (Status, [u8; BYTES]) {
        let page = match (cns, truth.get(&id)) {
            (2, _) => {
                *NamespaceList::new(truth.keys().copied().filter(|other| *other > id)).as_bytes()
            }
            (3, Some((_, set))) => build_descriptor_list(&[NamespaceIdentifier::Csi(*set)]),
            (0, Some((blocks, _))) => *IdentifyNamespace::zeroed()
                .with(|id| id.nsze(*blocks).ncap(*blocks).lbaf(0, LbaFormat::new(9, 0)))
                .as_bytes(),
            _ => return (Status::INVALID_NAMESPACE_OR_FORMAT, [0; BYTES]),
        };
        (Status::SUCCESS, page)
    }

    /// Runs a scan to its end: the events, and the number of commands.
    fn run_scan(
        manner: ScanCapabilities,
        truth: &Truth,
        known: &mut BTreeMap<u32, Namespace>,
        kept: BTreeSet<u32>,
    ) -> (Result<Vec<Event>, ScanError>, u32) {
        let mut scan = NamespaceScan::new(manner, kept);
        let mut questions = 0;
        while let Some(question) = scan.next_identify() {
            questions += 1;
            let (status, page) = identify_answer(truth, question.cns, question.nsid);
            if let Err(error) = scan.handle_result(status, &page) {
                return (Err(error), questions);
            }
        }
        (Ok(scan.finish(known)), questions)
    }

    fn scan_events(
        manner: ScanCapabilities,
        truth: &Truth,
        known: &mut BTreeMap<u32, Namespace>,
    ) -> Vec<Event> {
        run_scan(manner, truth, known, BTreeSet::new()).0.unwrap()
    }

    #[test]
    fn lists_longer_than_a_page_are_read_to_their_end() {
        for count in [0, 1, 1023, 1024, 1025, 2048, 2049] {
            let mut known = BTreeMap::new();
            let events = scan_events(MANNER, &scripted_namespaces(1..=count), &mut known);
            assert_eq!(events.len(), count as usize);
            assert!(known.keys().copied().eq(1..=count));
        }
    }

    #[test]
    fn each_namespace_change_yields_its_event() {
        let mut known = BTreeMap::new();
        let mut now = scripted_namespaces([1, 2, 3]);
        scan_events(MANNER, &now, &mut known);
        assert_eq!(scan_events(MANNER, &now, &mut known), [], "nothing changed");
        now.remove(&1);
        now.insert(2, (500, CommandSet::Nvm));
        now.insert(9, (1000, CommandSet::Nvm));
        now.insert(3, (1000, CommandSet::Zoned));
        let expected = [
            Event::NamespaceDetached { id: 1 },
            Event::NamespaceDetached { id: 3 },
            Event::NamespaceResized { id: 2, from_blocks: 1000, to_blocks: 500 },
            Event::NamespaceUnusable { id: 3, why: NamespaceError::CommandSet(CommandSet::Zoned) },
            Event::NamespaceAttached { id: 9 },
        ];
        assert_eq!(scan_events(MANNER, &now, &mut known), expected);
        assert!(known.keys().copied().eq([2, 9]));
    }

    #[test]
    fn only_changed_namespaces_are_identified_again() {
        let mut known = BTreeMap::new();
        let mut now = scripted_namespaces(1..=100);
        scan_events(MANNER, &now, &mut known);
        now.remove(&50);
        let kept = (1..=100).filter(|id| *id != 7).collect();
        let (events, questions) = run_scan(MANNER, &now, &mut known, kept);
        assert_eq!(events.unwrap(), [Event::NamespaceDetached { id: 50 }]);
        assert_eq!(questions, 3, "the list, and two about namespace 7");
        assert_eq!(known.len(), 99);
    }

    #[test]
    fn namespaces_beyond_the_limit_are_counted_and_ignored() {
        let few = ScanCapabilities { namespaces_max: 3, ..MANNER };
        let mut known = BTreeMap::new();
        let events = scan_events(few, &scripted_namespaces(1..=5), &mut known);
        assert_eq!(events.last(), Some(&Event::NamespacesIgnored { count: 2 }));
        assert_eq!(known.len(), 3);
    }

    #[test]
    fn unsorted_or_out_of_range_namespace_list_is_rejected() {
        for (list, found) in [(vec![1, 1], 1), (vec![5, 4], 4), (vec![3001], 3001)] {
            let mut scan = NamespaceScan::new(MANNER, BTreeSet::new());
            let page = NamespaceList::new(list);
            match scan.handle_result(Status::SUCCESS, page.as_bytes()) {
                Err(ScanError::Lie(lie)) => assert_eq!(lie.found, found),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn repeated_list_page_is_rejected() {
        let mut scan = NamespaceScan::new(MANNER, BTreeSet::new());
        let page = NamespaceList::new(1..=1024);
        assert_eq!(scan.handle_result(Status::SUCCESS, page.as_bytes()), Ok(()));
        assert!(scan.handle_result(Status::SUCCESS, page.as_bytes()).is_err());
    }

    #[test]
    fn controller_without_namespace_lists_is_scanned_by_every_nsid() {
        let old = ScanCapabilities { version: Version(0x0001_0000), highest: 4, ..MANNER };
        let mut known = BTreeMap::new();
        let (events, questions) =
            run_scan(old, &scripted_namespaces([1, 3]), &mut known, BTreeSet::new());
        assert_eq!(events.unwrap().len(), 2);
        assert_eq!(questions, 4);
    }

    #[test]
    fn invalid_namespace_does_not_affect_others() {
        let mut known = BTreeMap::new();
        let mut now = scripted_namespaces([1, 2]);
        now.insert(1, (1 << 60, CommandSet::Nvm));
        let events = scan_events(MANNER, &now, &mut known);
        assert!(matches!(
            events[..],
            [
                Event::NamespaceUnusable { id: 1, why: NamespaceError::InvalidData(_) },
                Event::NamespaceAttached { id: 2 }
            ]
        ));
    }

    #[test]
    fn scan_is_bounded_for_a_large_nn_without_lists() {
        let oldest = Version(0x0001_0000);
        let manner =
            ScanCapabilities { version: oldest, highest: u32::MAX, namespaces_max: 8, ..MANNER };
        let (events, questions) =
            run_scan(manner, &scripted_namespaces([1, 3]), &mut BTreeMap::new(), BTreeSet::new());
        let attached = |id| Event::NamespaceAttached { id };
        let ignored = Event::NamespacesIgnored { count: u32::MAX - 8 };
        assert_eq!(events.unwrap(), [attached(1), attached(3), ignored]);
        assert_eq!(questions, 8);
    }
}
