//! What a volume is called: the device with the store, and a name.

use volume::devices::Other;
use volume::{Claim, InjectedBugs, Store};

use super::{CACHE_DEFAULT, PAGE_BYTES};
use crate::MediumError;
use crate::backend::owned::is_gone;
use crate::uri::Uri;

/// A store, or a volume in one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The device that the store is on.
    pub store: Uri,
    /// The volume's name; empty if it is the store that is meant.
    pub name: String,
    /// Bytes of metadata in memory.
    pub cache_bytes: usize,
    /// Where devices of the store are, by their numbers, if they are not where they were.
    pub moved: Vec<(u32, Uri)>,
    /// Whether the store is taken from whoever has it open for writing.
    pub force: bool,
    /// Whether it is taken from an owner that its devices exclude from writing.
    pub takes_over: bool,
    /// Bugs that are put back on purpose.
    #[doc(hidden)]
    pub bugs: InjectedBugs,
}

impl Place {
    /// How a store there may be claimed: from nobody, from somebody who is gone or whom the devices exclude,
    /// or by force.
    pub(super) fn claim(&self, store: &Store, excluded: Option<u128>) -> Claim {
        match store.owner() {
            Some(_) if self.force => Claim::Force,
            Some(owner) if excluded == Some(owner.id) => Claim::Force,
            Some(owner) if is_gone(&owner) => Claim::Over(owner.id),
            _ => Claim::Free,
        }
    }

    /// What the kind is called.
    pub const SCHEME: &'static str = "volume";

    /// Reads `volume:[URI]/NAME?cache=32m`, with or without a name; and the name of a device, for
    /// the store that is on it.
    ///
    /// # Errors
    ///
    /// If it says what is not known.
    pub fn of(uri: &Uri) -> Result<Self, MediumError> {
        if uri.scheme() != Self::SCHEME {
            return Ok(Self::on(uri));
        }
        let store = uri.only_child()?.clone();
        let mut fields = uri.fields();
        let name = fields.behind().to_owned();
        let cache = fields.size("cache")?.unwrap_or(CACHE_DEFAULT);
        fields.finish()?;
        if cache < u64::from(PAGE_BYTES) {
            return Err(uri.refuse(format!("cache is {cache} bytes, expected 4k at least")).into());
        }
        let cache_bytes = usize::try_from(cache).unwrap_or(usize::MAX);
        Ok(Self { name, cache_bytes, ..Self::on(&store) })
    }

    /// The store on a device.
    pub fn on(device: &Uri) -> Self {
        let cache_bytes = usize::try_from(CACHE_DEFAULT).unwrap_or(usize::MAX);
        let (store, name, moved) = (device.clone(), String::new(), Vec::new());
        let (force, takes_over, bugs) = (false, false, InjectedBugs::default());
        Self { store, name, cache_bytes, moved, force, takes_over, bugs }
    }

    /// Where a device is that is not the first one.
    pub(super) fn device(&self, number: u32, other: &Other) -> Result<Uri, MediumError> {
        let moved = self.moved.iter().find(|(moved, _)| *moved == number);
        Ok(match moved {
            Some((_, uri)) => uri.clone().to_find(),
            None => other.uri.parse()?,
        })
    }

    /// The volume's name, which must be there.
    ///
    /// # Errors
    ///
    /// If it is not.
    pub fn volume(&self, uri: &Uri) -> Result<&str, MediumError> {
        if self.name.is_empty() {
            let problem = "the volume is missing, expected volume:[file:/path]/name";
            return Err(uri.refuse(problem).into());
        }
        Ok(&self.name)
    }

    /// What a volume of the same store is called.
    pub fn with_name(&self, name: &str) -> Uri {
        Uri::on(Self::SCHEME, self.store.clone(), name)
    }
}
