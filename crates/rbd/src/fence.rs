//! Fence of a gateway group: the clients of a former owner of images are blocklisted.
//!
//! A client is named by its cluster and its addresses, `rbd:FSID/ADDRESSES`. A connection has addresses that no other has had,
//! so a name stands for one connection of one process.

use tenmil_base::Error;
use tenmil_block::uri::Uri;

use crate::cluster::Cluster;
use crate::librbd::Functions;
use crate::rbd_uri::{ClusterAccess, RbdUri};

/// Names of the clients of this process that images of a device may use, or those of devices below it.
#[must_use]
pub fn client_names(uri: &Uri) -> Vec<String> {
    let connected = accesses([uri]).into_iter().flat_map(|access| Cluster::connected(&access));
    connected.map(|cluster| name_of(cluster.fsid(), cluster.addresses())).collect()
}

/// Whether a name is one of a client, and not of an owner of something else.
#[must_use]
pub fn is_client_name(name: &str) -> bool {
    parts_of(name).is_some()
}

/// Has the clusters of these devices reject the clients of these names, also requests that they have sent already. The
/// connections that images of these devices use from now on execute nothing before that. Blocks.
///
/// # Errors
///
/// If a client cannot be blocklisted, or none of the devices is in its cluster.
pub fn blocklist_clients<'a>(
    uris: impl IntoIterator<Item = &'a Uri>,
    names: &[String],
) -> Result<(), Error> {
    let accesses = accesses(uris);
    if accesses.is_empty() {
        return reject_others(names, &[]);
    }
    let functions = Functions::installed()?;
    blocklist_at(functions, &accesses, names)
}

/// Makes images that are opened from now on use new connections: another process may blocklist the present ones.
pub fn retire_clients() {
    Cluster::retire_all();
}

fn blocklist_at(
    functions: &'static Functions,
    accesses: &[ClusterAccess],
    names: &[String],
) -> Result<(), Error> {
    let mut fsids = Vec::new();
    for access in accesses {
        let is_named = |cluster: &Cluster| {
            names.iter().any(|name| *name == name_of(cluster.fsid(), cluster.addresses()))
        };
        let mut cluster = Cluster::connect(functions, access)?;
        // A connection of an earlier membership of this process.
        if is_named(&cluster) {
            cluster.retire();
            cluster = Cluster::connect(functions, access)?;
        }
        for name in names {
            if let Some((fsid, addresses)) = parts_of(name)
                && fsid == cluster.fsid()
            {
                cluster.blocklist(addresses)?;
            }
        }
        fsids.push(cluster.fsid().to_owned());
    }
    reject_others(names, &fsids)
}

/// An error if a name is of none of these clusters.
fn reject_others(names: &[String], fsids: &[String]) -> Result<(), Error> {
    let is_known = |name: &&String| {
        parts_of(name).is_some_and(|(fsid, _)| fsids.iter().any(|known| known == fsid))
    };
    let Some(other) = names.iter().find(|name| !is_known(name)) else { return Ok(()) };
    Err(Error::usage(format!(
        "fence {other}: no device is in its cluster, expected the devices that the former owner had"
    )))
}

/// How the clusters of the images of these devices, and of those below them, are reached, each once.
fn accesses<'a>(uris: impl IntoIterator<Item = &'a Uri>) -> Vec<ClusterAccess> {
    let mut found: Vec<ClusterAccess> = Vec::new();
    for uri in uris {
        let own = if uri.scheme() == RbdUri::SCHEME { RbdUri::from_uri(uri).ok() } else { None };
        for access in own.map(|name| name.access).into_iter().chain(accesses(uri.children())) {
            if !found.contains(&access) {
                found.push(access);
            }
        }
    }
    found
}

fn name_of(fsid: &str, addresses: &str) -> String {
    format!("rbd:{fsid}/{addresses}")
}

fn parts_of(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("rbd:")?.split_once('/')
}

#[cfg(test)]
mod tests {
    use tenmil_block::uri::Uri;

    use super::{Cluster, accesses, blocklist_at, client_names, name_of};
    use crate::librbd::fake;

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn images_below_other_devices_have_their_clusters_found_once() {
        let devices = [
            uri("mirror:[crypt:[rbd:p/i?user=f1]],[rbd:p/j?user=f1]"),
            uri("rbd:q/k?user=f2"),
            uri("ram:1m"),
        ];
        let found = accesses(&devices);
        let clients: Vec<&str> = found.iter().map(|access| &*access.options.client).collect();
        assert_eq!(clients, ["client.f1", "client.f2"]);
    }

    #[test]
    fn client_of_a_former_owner_is_blocklisted_once_and_that_of_an_earlier_membership_is_retired() {
        let device = uri("rbd:p/i?user=fence");
        let accesses = accesses([&device]);
        let earlier = Cluster::connect(&fake::FUNCTIONS, &accesses[0]).unwrap();
        let names = client_names(&device);
        assert_eq!(names, [name_of(earlier.fsid(), earlier.addresses())]);
        let other = name_of(earlier.fsid(), "192.0.2.1:0/7");
        let fenced = [names[0].clone(), other];
        blocklist_at(&fake::FUNCTIONS, &accesses, &fenced).unwrap();
        let present = Cluster::connect(&fake::FUNCTIONS, &accesses[0]).unwrap();
        assert_ne!(present.addresses(), earlier.addresses(), "a new connection");
        blocklist_at(&fake::FUNCTIONS, &accesses, &fenced).unwrap();
        for address in [earlier.addresses(), "192.0.2.1:0/7"] {
            assert!(fake::blocklist_count(address) >= 1, "{address}");
        }
        let first = name_of("another-cluster", "192.0.2.1:0/8");
        let error = blocklist_at(&fake::FUNCTIONS, &accesses, &[first]).unwrap_err();
        assert!(error.text.contains("no device is in its cluster"), "{error}");
        assert_eq!(fake::blocklist_count("192.0.2.1:0/8"), 0);
    }

    #[test]
    fn name_without_a_device_that_can_fence_it_is_an_error() {
        let error =
            super::blocklist_clients([&uri("ram:1m")], &["rbd:f/a".to_owned()]).unwrap_err();
        assert!(error.text.starts_with("fence rbd:f/a: "), "{error}");
        super::blocklist_clients([&uri("ram:1m")], &[]).unwrap();
    }
}
