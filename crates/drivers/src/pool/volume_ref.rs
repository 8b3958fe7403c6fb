//! Reference to a volume: the device of its pool, and its name.

use tenmil_volume::device_table::SecondaryDevice;
use tenmil_volume::{ClaimCondition, InjectedBugs, Pool, PoolOwner};

use super::{CACHE_DEFAULT, PAGE_BYTES};
use crate::owner_identity::has_owner_ended;
use tenmil_base::Error;
use tenmil_block::uri::Uri;

/// A reference to a pool or to a volume in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRef {
    /// Device of the pool.
    pub store: Uri,
    /// Name of the volume; empty for the pool itself.
    pub name: String,
    /// Size in bytes of the metadata cache.
    pub cache_bytes: usize,
    /// New URIs of moved devices, by device number.
    pub moved: Vec<(u32, Uri)>,
    /// Take the pool over from an owner that has it open for writing.
    pub force: bool,
    /// Whether it is taken from an owner that its devices exclude from writing.
    pub takes_over: bool,
    /// Identifier of an owner that is known to write no more: the pool is taken from it.
    pub former_owner: Option<u128>,
    /// Bugs that tests inject.
    #[doc(hidden)]
    pub bugs: InjectedBugs,
}

impl VolumeRef {
    /// How the pool may be claimed: if it has no owner, from an owner that is gone or whom the devices exclude,
    /// or by force.
    pub(super) fn claim_condition(&self, store: &Pool, excluded: Option<u128>) -> ClaimCondition {
        match store.owner() {
            Some(_) if self.takes_from_any(store) => ClaimCondition::Force,
            Some(owner) if excluded == Some(owner.id) => ClaimCondition::Force,
            Some(owner) if has_owner_ended(&owner) => ClaimCondition::Over(owner.id),
            _ => ClaimCondition::Free,
        }
    }

    /// Whether it is taken from its owner without a proof that the owner has ended, or is excluded.
    pub(super) fn takes_from_any(&self, store: &Pool) -> bool {
        let is_former = |owner: PoolOwner| self.former_owner == Some(owner.id);
        self.force || store.owner().is_some_and(is_former)
    }

    /// The URI scheme of volumes.
    pub const SCHEME: &'static str = "volume";

    /// Parses `volume:[URI]/NAME?metadata-cache=32m`, with or without a name; any other URI refers to the pool on
    /// that device.
    ///
    /// # Errors
    ///
    /// If there is an unknown option, or the cache size is invalid.
    pub fn parse(uri: &Uri) -> Result<Self, Error> {
        if uri.scheme() != Self::SCHEME {
            return Ok(Self::pool_on(uri));
        }
        let store = uri.single_child()?.clone();
        let mut fields = uri.options();
        let name = fields.path_after_children().to_owned();
        let cache = fields.size_value("metadata-cache")?.unwrap_or(CACHE_DEFAULT);
        fields.reject_unconsumed()?;
        if cache < u64::from(PAGE_BYTES) {
            return Err(uri.error(format!("cache is {cache} bytes, expected 4k at least")).into());
        }
        let cache_bytes = usize::try_from(cache).unwrap_or(usize::MAX);
        Ok(Self { name, cache_bytes, ..Self::pool_on(&store) })
    }

    /// The pool on a device.
    pub fn pool_on(device: &Uri) -> Self {
        let cache_bytes = usize::try_from(CACHE_DEFAULT).unwrap_or(usize::MAX);
        let (store, name, moved) = (device.clone(), String::new(), Vec::new());
        let (force, takes_over, former_owner) = (false, false, None);
        let bugs = InjectedBugs::default();
        Self { store, name, cache_bytes, moved, force, takes_over, former_owner, bugs }
    }

    /// The URI of a device other than the first.
    pub(super) fn device_uri(&self, number: u32, other: &SecondaryDevice) -> Result<Uri, Error> {
        let moved = self.moved.iter().find(|(moved, _)| *moved == number);
        Ok(match moved {
            Some((_, uri)) => uri.clone().for_probing(),
            None => other.uri.parse()?,
        })
    }

    /// The name of the volume, which must be present.
    ///
    /// # Errors
    ///
    /// If it is missing.
    pub fn volume_name(&self, uri: &Uri) -> Result<&str, Error> {
        if self.name.is_empty() {
            let problem = "the volume is missing, expected POOL/NAME such as /var/tmp/pool/db, or volume:[URI]/NAME";
            return Err(uri.error(problem).into());
        }
        Ok(&self.name)
    }

    /// The URI of another volume of the same pool.
    pub fn uri_of_other_volume(&self, name: &str) -> Uri {
        Uri::with_child(Self::SCHEME, self.store.clone(), name)
    }
}
