//! Fence of a gateway group: the pools of a former owner are taken over.
//!
//! An owner is named by its pool and its identifier, `pool:UUID/OWNER`. An identifier is drawn when a pool is opened, so a
//! name stands for one opened pool of one process.

use tenmil_base::Error;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;

use super::{OpenPool, VolumeRef, take_over_pool};

/// Names of this process as the owner of the pools of a device, and of those of devices below it. A pool that it does not own
/// has none.
///
/// # Errors
///
/// If a pool cannot be opened.
pub fn owner_names(opener: &Opener<'_>, uri: &Uri) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    for place in pools_of(uri)? {
        let open = OpenPool::open(opener, &place)?;
        if open.is_owner() {
            names.push(name_of(open.uuid(), open.owns.owner_record().id));
        }
    }
    Ok(names)
}

/// Takes the pools of these devices over from the owners of these names, which are known to write no more. A pool that has
/// another owner, or none, is left as it is.
///
/// # Errors
///
/// If a pool cannot be taken over, or none of the devices is on one of a name.
pub fn take_over_pools<'a>(
    opener: &Opener<'_>,
    uris: impl IntoIterator<Item = &'a Uri>,
    names: &[String],
) -> Result<(), Error> {
    let mut known = Vec::new();
    for uri in uris {
        for place in pools_of(uri)? {
            known.push(take_over(opener, &place, names)?);
        }
    }
    let is_known = |name: &&String| parts_of(name).is_some_and(|(uuid, _)| known.contains(&uuid));
    match names.iter().find(|name| !is_known(name)) {
        None => Ok(()),
        Some(other) => Err(Error::usage(format!(
            "fence {other}: no device is in this pool, expected the devices that the former owner had"
        ))),
    }
}

/// Returns the UUID of the pool.
fn take_over(opener: &Opener<'_>, place: &VolumeRef, names: &[String]) -> Result<u128, Error> {
    let open = OpenPool::open(opener, place)?;
    let uuid = open.uuid();
    let owner = open.shared.lock().store.owner();
    drop(open);
    let Some(owner) = owner.filter(|owner| names.contains(&name_of(uuid, owner.id))) else {
        return Ok(uuid);
    };
    let place = VolumeRef { former_owner: Some(owner.id), ..place.clone() };
    take_over_pool(opener, &place).map(|_| uuid)
}

/// Pools of a device and of those below it.
fn pools_of(uri: &Uri) -> Result<Vec<VolumeRef>, Error> {
    let mut found = Vec::new();
    if uri.scheme() == VolumeRef::SCHEME {
        found.push(VolumeRef { name: String::new(), ..VolumeRef::parse(uri)? });
    }
    for below in uri.children() {
        found.extend(pools_of(below)?);
    }
    Ok(found)
}

fn name_of(uuid: u128, owner: u128) -> String {
    format!("pool:{uuid:032x}/{owner:032x}")
}

fn parts_of(name: &str) -> Option<(u128, &str)> {
    let (uuid, owner) = name.strip_prefix("pool:")?.split_once('/')?;
    Some((u128::from_str_radix(uuid, 16).ok()?, owner))
}
