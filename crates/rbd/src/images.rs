//! Images of a pool and their snapshots: create, list, clone, resize, roll back, delete.
//!
//! An image is named by its URI, `rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`, with the options that reach its cluster. Every call
//! blocks until the cluster has done it, each request of which ends after `io-timeout`.

use std::sync::Arc;

use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;

use crate::ceph_error::ceph_error;
use crate::cluster::Cluster;
use crate::librbd::{CephErrno, Functions, Image, OpenMode, PoolContext};
pub use crate::librbd::{ImageSpec, SnapshotRow};
use crate::rbd_uri::{PoolPlace, RbdUri};

/// An image with its size and its snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRow {
    /// Name and identifier.
    pub image: ImageSpec,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Bytes of an object.
    pub object_bytes: u64,
    /// Snapshots, oldest first.
    pub snapshots: Vec<SnapshotRow>,
}

/// The image of a URI in its pool, which is open.
struct NamedImage {
    /// Keeps the connection.
    _cluster: Arc<Cluster>,
    pool: Arc<PoolContext>,
    name: RbdUri,
    /// The URI, for messages.
    uri: String,
}

/// Whether a URI names an image of a cluster, or a pool of images.
pub fn is_image(uri: &Uri) -> bool {
    uri.scheme() == RbdUri::SCHEME
}

/// Lists the images of `rbd:POOL[/NAMESPACE]`.
///
/// # Errors
///
/// If there is no such pool, or the cluster does not answer.
pub fn list(uri: &Uri) -> Result<Vec<ImageRow>, Error> {
    let place = PoolPlace::from_uri(uri)?;
    let context = |error: Error| error.with_context(format!("list {uri:#}"));
    let cluster = Functions::installed()
        .and_then(|functions| Cluster::connect(functions, &place.access))
        .map_err(context)?;
    let pool = cluster.pool(&place.pool, &place.namespace).map_err(context)?;
    let images = pool.list_images().map_err(|errno| ceph_error(format!("list {uri:#}"), errno))?;
    let regions = RegionTable::new(0);
    let mut rows = Vec::new();
    for image in images {
        match image_row(&pool, &regions, &image) {
            Ok((size_bytes, object_bytes, snapshots)) => {
                rows.push(ImageRow { image, size_bytes, object_bytes, snapshots });
            }
            // Deleted since it was listed.
            Err(CephErrno(libc::ENOENT)) => {}
            Err(errno) => {
                return Err(ceph_error(format!("list {uri:#}: open {}", image.name), errno));
            }
        }
    }
    Ok(rows)
}

fn image_row(
    pool: &Arc<PoolContext>,
    regions: &RegionTable,
    image: &ImageSpec,
) -> Result<(u64, u64, Vec<SnapshotRow>), CephErrno> {
    let open = Image::open(pool, &image.name, None, OpenMode::ReadOnly, regions)?;
    let layout = open.layout()?;
    Ok((layout.size_bytes, layout.object_bytes, open.list_snapshots()?))
}

/// Creates an image. Its objects have `object_bytes`, a power of two, or as many as the configuration of Ceph states.
///
/// # Errors
///
/// If it exists, or the size of its objects is not one that Ceph accepts.
pub fn create(uri: &Uri, size_bytes: u64, object_bytes: Option<u64>) -> Result<(), Error> {
    let order = object_bytes.map(|bytes| object_order(uri, bytes)).transpose()?;
    let named = NamedImage::of_image(uri)?;
    let created = named.pool.create_image(&named.name.place.image, size_bytes, order);
    named.explain("create", created)
}

/// Deletes an image that has no snapshots. Returns false if it does not exist, unless that is an error.
///
/// # Errors
///
/// If it has snapshots, a client has it open, or it does not exist and `must_exist` is true.
pub fn delete(uri: &Uri, must_exist: bool) -> Result<bool, Error> {
    let named = NamedImage::of_image(uri)?;
    let deleted = named.pool.remove_image(&named.name.place.image);
    named.explain("delete", unless_missing(deleted, must_exist))
}

/// Changes the size of an image. Clients that have it open are notified.
///
/// # Errors
///
/// If another client keeps the exclusive lock, or the image would be shorter and `may_shrink` is false.
pub fn resize(uri: &Uri, size_bytes: u64, may_shrink: bool) -> Result<(), Error> {
    let named = NamedImage::of_image(uri)?;
    let image = named.explain("resize", named.open())?;
    let before = named.explain("resize", image.size_bytes())?;
    if size_bytes < before && !may_shrink {
        let text = format!(
            "resize {uri:#} from {before} to {size_bytes} bytes: data beyond the new end would be lost"
        );
        return Err(Error::usage(text).with_hint("Add `--shrink`."));
    }
    named.explain("resize", image.resize(size_bytes))
}

/// Copies what a clone reads from its parent, so that the parent snapshot can be deleted.
///
/// # Errors
///
/// If it is not a clone.
pub fn flatten(uri: &Uri) -> Result<(), Error> {
    let named = NamedImage::of_image(uri)?;
    named.explain("detach from its parent", named.open().and_then(|image| image.flatten()))
}

/// Creates the snapshot that the URI names.
///
/// # Errors
///
/// If it exists.
pub fn create_snapshot(uri: &Uri) -> Result<(), Error> {
    let (named, snapshot) = NamedImage::of_snapshot(uri)?;
    let open = named.open();
    named.explain("create snapshot", open.and_then(|image| image.create_snapshot(&snapshot)))
}

/// Deletes the snapshot that the URI names. Returns false if it or its image does not exist, unless that is an error.
///
/// # Errors
///
/// If it is protected, or it does not exist and `must_exist` is true.
pub fn delete_snapshot(uri: &Uri, must_exist: bool) -> Result<bool, Error> {
    let (named, snapshot) = NamedImage::of_snapshot(uri)?;
    let deleted = named.open().and_then(|image| image.remove_snapshot(&snapshot));
    named.explain("delete snapshot", unless_missing(deleted, must_exist))
}

/// Sets the image back to the snapshot that the URI names. What was written since is lost.
///
/// # Errors
///
/// If there is no such snapshot, or another client keeps the exclusive lock.
pub fn roll_back(uri: &Uri) -> Result<(), Error> {
    let (named, snapshot) = NamedImage::of_snapshot(uri)?;
    named.explain("roll back", named.open().and_then(|image| image.roll_back(&snapshot)))
}

/// Creates the image `into` as a clone of the snapshot that `uri` names, in the same cluster.
///
/// # Errors
///
/// If the snapshot does not exist, or the image does.
pub fn clone(uri: &Uri, into: &Uri) -> Result<(), Error> {
    let (parent, snapshot) = NamedImage::of_snapshot(uri)?;
    let target = NamedImage::of_image(into)?;
    if parent.name.access != target.name.access {
        return Err(Error::usage(format!(
            "clone {uri:#} to {into:#}: their options reach different clusters or clients, expected the same `conf`, \
             `cluster` and `user`"
        )));
    }
    let image = &parent.name.place.image;
    let cloned = parent.pool.clone_image(image, &snapshot, &target.pool, &target.name.place.image);
    target.explain(&format!("clone {uri:#} to"), cloned)
}

/// Whether something was deleted.
fn unless_missing(deleted: Result<(), CephErrno>, must_exist: bool) -> Result<bool, CephErrno> {
    match deleted {
        Err(CephErrno(libc::ENOENT)) if !must_exist => Ok(false),
        deleted => deleted.map(|()| true),
    }
}

impl NamedImage {
    /// The image of a URI without a snapshot.
    fn of_image(uri: &Uri) -> Result<Self, Error> {
        let named = Self::new(uri)?;
        match named.name.snapshot {
            None => Ok(named),
            Some(_) => Err(uri.error("names a snapshot, expected rbd:POOL/IMAGE").into()),
        }
    }

    /// The image of a URI with a snapshot, and the snapshot.
    fn of_snapshot(uri: &Uri) -> Result<(Self, String), Error> {
        let mut named = Self::new(uri)?;
        match named.name.snapshot.take() {
            Some(snapshot) => Ok((named, snapshot)),
            None => Err(uri.error("names no snapshot, expected rbd:POOL/IMAGE@SNAPSHOT").into()),
        }
    }

    fn new(uri: &Uri) -> Result<Self, Error> {
        let name = RbdUri::from_uri(uri)?;
        let context = |error: Error| error.with_context(format!("open {uri:#}"));
        let cluster = Functions::installed()
            .and_then(|functions| Cluster::connect(functions, &name.access))
            .map_err(context)?;
        let pool = cluster.pool(&name.place.pool, &name.place.namespace).map_err(context)?;
        Ok(Self { _cluster: cluster, pool, name, uri: format!("{uri:#}") })
    }

    fn open(&self) -> Result<Image, CephErrno> {
        // No requests: no memory.
        let regions = RegionTable::new(0);
        Image::open(&self.pool, &self.name.place.image, None, OpenMode::ReadWrite, &regions)
    }

    fn explain<T>(&self, doing: &str, result: Result<T, CephErrno>) -> Result<T, Error> {
        result.map_err(|errno| ceph_error(format!("{doing} {}", self.uri), errno))
    }
}

/// The exponent of the size of objects.
fn object_order(uri: &Uri, bytes: u64) -> Result<u8, Error> {
    let order = u8::try_from(bytes.trailing_zeros()).unwrap_or(u8::MAX);
    if !bytes.is_power_of_two() || !(12..=25).contains(&order) {
        let text = format!("objects of {bytes} bytes, expected a power of two from 4k to 32m");
        return Err(uri.error(text).into());
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use tenmil_block::uri::Uri;

    use super::{clone, create, create_snapshot, delete, list, object_order};

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn size_of_objects_is_a_power_of_two_that_ceph_accepts() {
        assert_eq!(object_order(&uri("rbd:p/i"), 4 << 20).unwrap(), 22);
        for bytes in [0, 1, 2048, 5000, 64 << 20] {
            let refused = create(&uri("rbd:p/i"), 1 << 20, Some(bytes)).unwrap_err().text;
            assert!(refused.contains("expected a power of two from 4k to 32m"), "{refused}");
        }
    }

    #[test]
    fn malformed_names_are_rejected_before_a_cluster_is_looked_for() {
        for refused in [
            list(&uri("rbd:p/n/i")).map(drop),
            create(&uri("rbd:p"), 1 << 20, None),
            delete(&uri("rbd:p/i?unheard-of=1"), true).map(drop),
            create_snapshot(&uri("rbd:p/i@")),
            clone(&uri("rbd:p@s"), &uri("rbd:p/j")),
        ] {
            let refused = refused.unwrap_err().text;
            assert!(refused.contains("expected"), "{refused}");
            assert!(!refused.contains("librados"), "{refused}");
        }
    }
}
