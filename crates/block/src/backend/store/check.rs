//! A look at all metadata of a store: of one that nobody has open, or of one that this process serves.
//!
//! While a store is served its metadata change all the time, but never in place: what a durable superblock
//! leads to is left where it is until a later one is durable. So a check holds that state still. What the
//! store frees meanwhile is not given out, and whoever writes does not wait. Where that would take the
//! last room from those who write, the check gives it back and ends.

use base::Blame;
use volume::format::{Kind, decode_superblock};
use volume::{
    Account, Action, Answer, Ask, Check, Counted, Damage, End, Finding, Flaw, Parent, Report, Store,
};

use super::ground::DeviceInfo;
use super::make::read_into;
use super::outside::{self, CheckedParent, Child};
use super::raw::{Raw, StorePages};
use super::scrub::{POLITE_BLOCKS, STREAM_WAIT_MAX};
use super::send::Watch;
use super::{OpenStore, PAGE_BYTES};
use crate::MediumError;
use crate::open::Opener;

/// What a look at a whole store has found.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The store's name.
    pub name: String,
    /// Which store it is.
    pub uuid: u128,
    /// The transaction that was looked at.
    pub generation: u64,
    /// What it lies on.
    pub devices: Vec<DeviceInfo>,
    /// Copies of the superblock that cannot be read, and what is wrong with them.
    pub damaged: Vec<String>,
    /// What else is wrong, and how much was looked at.
    pub report: Report,
    /// What lies below volumes outside the store, and whether it could be looked at. It is no fault of
    /// the store if it could not.
    pub parents: Vec<CheckedParent>,
}

/// A way through a store that does not change.
pub(super) struct Walk<'a, P> {
    pub(super) pages: &'a mut P,
    pub(super) store: &'a mut Store,
}

/// Where pages come from.
pub(super) trait Pages {
    /// Has `take` look at a page, or at why it cannot be read.
    fn read_into(&mut self, at: u64, take: impl FnOnce(Result<&[u8; 4096], base::Outcome>));
}

/// The last durable state of an open store, that is held still.
struct Still<'a> {
    open: &'a OpenStore,
    store: Store,
}

/// How often it is tried to find a superblock that is not being written over.
const LOOKS_MAX: u32 = 8;

impl OpenStore {
    /// Looks at all metadata that the last durable superblock leads to, while others go on.
    ///
    /// # Errors
    ///
    /// If memory is short, the store needs the room that is held still, or `watch` says no.
    pub fn check(
        &self,
        opener: &Opener<'_>,
        watch: &mut Watch<'_>,
    ) -> Result<Checked, MediumError> {
        let machine = |problem: String| {
            MediumError::new(Blame::Machine, format!("{}: check: {problem}", self.name))
        };
        let mut pages = StorePages::open(self, 1).map_err(machine)?;
        let damaged = self.look_at_superblocks(&mut pages);
        let mut still = Still::of(self);
        let mut read = 0;
        let (report, found) =
            Walk { pages: &mut pages, store: &mut still.store }.whole(&mut |left| {
                read += 1;
                if read % u64::from(POLITE_BLOCKS) == 0 {
                    self.let_others_go_first(STREAM_WAIT_MAX);
                }
                self.expect_room()?;
                let bytes = |pages: u64| pages * u64::from(PAGE_BYTES);
                match watch((bytes(read), bytes(read + left))) {
                    true => Ok(()),
                    false => Err(machine("it was interrupted".into())),
                }
            })?;
        let (name, uuid, generation) =
            (still.store.name(), still.store.uuid(), still.store.generation());
        let devices = self.ground().infos(still.store.devices());
        drop(still);
        let child = Child { device: &self.name, uuid };
        let parents = outside::look_at_all(opener, child, found.into_iter());
        let damaged = damaged.iter().map(ToString::to_string).collect();
        Ok(Checked { name, uuid, generation, devices, damaged, report, parents })
    }

    /// Refuses to go on if what is held still is the last room.
    fn expect_room(&self) -> Result<(), MediumError> {
        if !self.shared.lock().store.lacks_what_is_held() {
            return Ok(());
        }
        let text = format!(
            "{}: check: the store has no room left but what the check holds still, expected more",
            self.name
        );
        let hint = "Delete what nobody needs or grow it, or check it while less is written; what was \
                    held is given back.";
        Err(MediumError::new(Blame::Machine, text).with_hint(hint))
    }

    /// Reads both copies of the last durable superblock. Those that are written over meanwhile are looked
    /// at no more; a store that commits all the time may have none to look at.
    fn look_at_superblocks(&self, pages: &mut StorePages<'_>) -> Vec<Damage> {
        for _ in 0..LOOKS_MAX {
            let (uuid, generation, places) = {
                let store = &self.shared.lock().store;
                (store.uuid(), store.generation(), store.superblocks())
            };
            let mut damaged = Vec::new();
            for address in places {
                pages.read_into(address, |bytes| {
                    let found = bytes
                        .map_err(Flaw::Unread)
                        .and_then(|bytes| decode_superblock(bytes, address));
                    let flaw = match found {
                        Ok((found, at, ..)) if (found, at) == (uuid, generation) => None,
                        Ok((_, found, ..)) => {
                            Some(Flaw::Generation { found, expected: generation })
                        }
                        Err(flaw) => Some(flaw),
                    };
                    let kind = Some(Kind::Superblock);
                    damaged.extend(flaw.map(|flaw| Damage { address, kind, owner: 0, flaw }));
                });
            }
            // The one behind it goes to other places, and only the second one comes back to these.
            if damaged.is_empty() || self.generation() == generation {
                return damaged;
            }
        }
        Vec::new()
    }
}

impl<'a> Still<'a> {
    fn of(open: &'a OpenStore) -> Self {
        let store = open.shared.lock().store.hold_still();
        Self { open, store }
    }
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.open.shared.lock_to_tell().store.let_go(self.store.generation());
    }
}

impl Pages for Raw<'_> {
    fn read_into(&mut self, at: u64, take: impl FnOnce(Result<&[u8; 4096], base::Outcome>)) {
        read_into(self, at, take);
    }
}

impl Pages for StorePages<'_> {
    fn read_into(&mut self, at: u64, take: impl FnOnce(Result<&[u8; 4096], base::Outcome>)) {
        match self.up_to(at + 1) {
            Ok(raw) => read_into(raw, at, take),
            Err(outcome) => take(Err(outcome)),
        }
    }
}

impl<P: Pages> Walk<'_, P> {
    /// Looks at everything, and compares what the store says of the room of each volume with what was
    /// counted. Before each block `goes_on` is told how many are known to be left, and may end it. Returns
    /// what was found, and which volumes have parents.
    pub(super) fn whole(
        &mut self,
        goes_on: &mut dyn FnMut(u64) -> Result<(), MediumError>,
    ) -> Result<(Report, Vec<(String, Parent)>), MediumError> {
        let mut check = Check::of(self.store);
        while let Some(at) = check.next_read() {
            goes_on(check.left() as u64)?;
            self.pages.read_into(at, |bytes| check.handle_read(bytes));
        }
        let mut report = check.finish();
        for counted in &report.accounts {
            let told = self.account(&counted.name, goes_on)?;
            report.findings.extend(differs(counted, told));
        }
        Ok((report, self.parents(goes_on)?))
    }

    /// What the store says of the room of a volume.
    fn account(
        &mut self,
        name: &str,
        goes_on: &mut dyn FnMut(u64) -> Result<(), MediumError>,
    ) -> Result<Option<Account>, MediumError> {
        Ok(match self.ask(Ask::Account(name.into()), goes_on)? {
            Some(Answer::Account(account)) => Some(account),
            _ => None,
        })
    }

    /// Volumes that have parents, and which.
    fn parents(
        &mut self,
        goes_on: &mut dyn FnMut(u64) -> Result<(), MediumError>,
    ) -> Result<Vec<(String, Parent)>, MediumError> {
        let Some(Answer::Volumes(volumes)) = self.ask(Ask::List, goes_on)? else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for info in volumes.into_iter().filter(|info| info.reach > 0) {
            if let Some(Answer::Parent(Some(parent))) =
                self.ask(Ask::Parent { volume: info.id }, goes_on)?
            {
                found.push((info.name, parent));
            }
        }
        Ok(found)
    }

    /// What the store answers, with nothing written, whatever it wants written.
    fn ask(
        &mut self,
        ask: Ask,
        goes_on: &mut dyn FnMut(u64) -> Result<(), MediumError>,
    ) -> Result<Option<Answer>, MediumError> {
        self.store.submit(0, ask);
        while let Some(action) = self.store.next_action() {
            if let Action::ReadPage { io, at } = action {
                goes_on(0)?;
                let store = &mut *self.store;
                self.pages.read_into(at, |bytes| match bytes {
                    Ok(bytes) => store.complete(io, End::Read(bytes)),
                    Err(outcome) => store.complete(io, End::Failed(outcome)),
                });
            }
        }
        Ok(self.store.next_answer().and_then(|(_, answer)| answer.ok()))
    }
}

/// Whether the room of a volume is not what a walk through everything says it is.
fn differs(counted: &Counted, told: Option<Account>) -> Option<Finding> {
    let Counted { volume, account, .. } = *counted;
    let told = told.unwrap_or_default();
    let numbers = [
        ("unique blocks", told.unique, account.unique),
        ("shared blocks", told.shared, account.shared),
        ("reserved blocks", told.reserved, account.reserved),
        ("missing blocks", told.missing, account.missing),
    ];
    let wrong = numbers.into_iter().find(|(_, told, counted)| told != counted);
    let (what, recorded, counted) = wrong.unwrap_or(("used blocks", told.used, account.used));
    (told != account).then_some(Finding::Number { what, volume, recorded, counted })
}
