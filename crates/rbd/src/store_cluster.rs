//! Where the store of a group is in a cluster, and the connection that its stores and its watch share.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{Error, Instant, Span};
use tenmil_block::uri::{Uri, UriError};
use tenmil_group::LeaseId;
use tenmil_linux::{Clock, EventFdVectors};

use crate::ceph_error::ceph_error;
use crate::cluster::Cluster;
use crate::librbd::{CephErrno, Functions, ObjectWatch};
use crate::rados_store::PoolObject;
use crate::rbd_uri::{CacheMode, ClusterAccess, ImagePlace};

/// Object of a pool that holds the store of a group: `rados:POOL/[NAMESPACE/]OBJECT`, with options as those of `rbd:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RadosUri {
    uri: Uri,
    place: ImagePlace,
    access: ClusterAccess,
}

/// The connection to the cluster of a store. Clones share it.
#[derive(Clone, Debug)]
pub struct StoreCluster {
    uri: Arc<RadosUri>,
    access: ClusterAccess,
    connection: Arc<Mutex<Option<Arc<Cluster>>>>,
}

/// Notifications of changes in the store of a group.
#[derive(Debug)]
pub struct RadosWatch {
    cluster: StoreCluster,
    group: String,
    signal: EventFdVectors,
    watch: Option<ObjectWatch>,
    clock: Clock,
    /// Leases that were in force when they were read last, and when they are read next.
    leases: BTreeSet<LeaseId>,
    leases_due: Instant,
}

/// Interval at which leases are read: nothing notifies that one has ended.
const LEASES_INTERVAL: Span = Span::from_ms(250);
/// Maximum time to connect to a monitor. No lease is held before.
const CONNECT_TIMEOUT: Span = Span::from_secs(5);

impl RadosUri {
    /// URI scheme.
    pub const SCHEME: &'static str = "rados";

    /// Parses `rados:POOL/[NAMESPACE/]OBJECT`, with the options `conf`, `user`, `cluster` and `conf-NAME`.
    ///
    /// # Errors
    ///
    /// If it has another form.
    pub fn parse(text: &str) -> Result<Self, UriError> {
        let uri: Uri = text.parse()?;
        let expected = "expected rados:POOL/OBJECT or rados:POOL/NAMESPACE/OBJECT";
        let malformed = || uri.error(format!("`{}` names no object, {expected}", uri.path()));
        if uri.scheme() != Self::SCHEME || !uri.children().is_empty() {
            return Err(uri.error(expected));
        }
        let (place, snapshot) = ImagePlace::parse(uri.path()).map_err(|_| malformed())?;
        if snapshot.is_some() || place.image.contains('\0') {
            return Err(malformed());
        }
        let mut fields = uri.options();
        let times = (CONNECT_TIMEOUT, CONNECT_TIMEOUT);
        let access = ClusterAccess::with_timeouts(&uri, &mut fields, CacheMode::Off, times)?;
        fields.reject_unconsumed()?;
        Ok(Self { uri, place, access })
    }

    /// The configuration file of Ceph, if one is named.
    #[must_use]
    pub fn conf(&self) -> Option<&str> {
        self.access.options.conf.as_deref()
    }
}

impl fmt::Display for RadosUri {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.uri)
    }
}

impl StoreCluster {
    /// The cluster of this object, which is connected by the first operation. An operation takes `time_limit` at most, in
    /// whole seconds.
    #[must_use]
    pub fn new(uri: &RadosUri, time_limit: Span) -> Self {
        let access = uri.access.with_io_timeout(time_limit);
        Self { uri: Arc::new(uri.clone()), access, connection: Arc::default() }
    }

    /// The object. Connects if there is no connection.
    pub(crate) fn object(&self) -> Result<PoolObject, Error> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let cluster = match &*connection {
            Some(open) => Arc::clone(open),
            None => {
                let context = |error: Error| error.with_context(self.to_string());
                let functions = Functions::installed().map_err(context)?;
                let new = Cluster::connect_unshared(functions, &self.access).map_err(context)?;
                Arc::clone(connection.insert(Arc::new(new)))
            }
        };
        drop(connection);
        let ImagePlace { pool, namespace, image } = &self.uri.place;
        let pool = cluster.pool(pool, namespace)?;
        Ok(PoolObject { pool, name: CString::new(image.as_str()).unwrap_or_default() })
    }

    /// Has the next operation make a new connection, if the cluster rejects this client.
    pub(crate) fn handle_error(&self, errno: CephErrno) {
        if errno.0 == libc::ESHUTDOWN {
            *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

impl fmt::Display for StoreCluster {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "store {:#}", self.uri.uri)
    }
}

impl RadosWatch {
    /// Notifications of changes of the keys of this group.
    ///
    /// # Errors
    ///
    /// If no descriptor can be had.
    pub fn new(cluster: &StoreCluster, group: &str, clock: Clock) -> Result<Self, Error> {
        let signal = EventFdVectors::new(1)
            .map_err(|error| Error::environment(format!("watch {cluster}: {error}")))?;
        Ok(Self {
            cluster: cluster.clone(),
            group: group.to_owned(),
            signal,
            watch: None,
            clock,
            leases: BTreeSet::new(),
            leases_due: Instant::default(),
        })
    }

    /// Waits for a change, up to `time_limit`. True if there may be one: also after a watch was lost and made again.
    ///
    /// # Errors
    ///
    /// Why nothing is watched; then nothing is waited for.
    pub fn wait(&mut self, time_limit: Span) -> Result<bool, String> {
        if self.watch.as_ref().is_none_or(ObjectWatch::is_lost) {
            self.watch = None;
            let object = self.cluster.object().map_err(|error| error.text)?;
            let watch = ObjectWatch::new(&object.pool, &object.name, &self.signal);
            self.watch = Some(self.explain(watch)?);
            return Ok(true);
        }
        let is_signaled = self.signal.wait_for_signal(0, time_limit);
        if is_signaled.map_err(|error| error.to_string())? {
            return Ok(true);
        }
        let now = self.clock.now();
        if now < self.leases_due {
            return Ok(false);
        }
        self.leases_due = now.after(LEASES_INTERVAL);
        let object = self.cluster.object().map_err(|error| error.text)?;
        let leases = object.leases_of(&self.group);
        let leases = self.explain(leases)?;
        let has_changed = leases != self.leases;
        self.leases = leases;
        Ok(has_changed)
    }

    fn explain<T>(&mut self, result: Result<T, CephErrno>) -> Result<T, String> {
        result.map_err(|errno| {
            // A watch belongs to its connection.
            self.watch = None;
            self.cluster.handle_error(errno);
            ceph_error(format!("watch {}", self.cluster), errno).text
        })
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;

    use super::{RadosUri, StoreCluster};

    #[test]
    fn object_and_its_cluster_are_parsed_and_others_rejected() {
        let uri = RadosUri::parse("rados:rbd/ns/group?conf=/c&user=gw").unwrap();
        assert_eq!((uri.place.pool.as_str(), uri.place.image.as_str()), ("rbd", "group"));
        assert_eq!((uri.place.namespace.as_str(), uri.conf()), ("ns", Some("/c")));
        assert_eq!(uri.to_string(), "rados:rbd/ns/group?conf=/c&user=gw");
        for (wrong, expected) in [
            ("rados:rbd", "names no object"),
            ("rados:rbd/", "names no object"),
            ("rados:rbd/a@b", "names no object"),
            ("rbd:rbd/a", "expected rados:POOL/OBJECT"),
            ("rados:[ram:1m]/a", "expected rados:POOL/OBJECT"),
            ("rados:rbd/a?io-timeout=1s", "no parameter `io-timeout`"),
            ("rados:rbd/a?block=4k", "no parameter `block`"),
        ] {
            let error = RadosUri::parse(wrong).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn operations_of_the_store_end_within_whole_seconds() {
        let uri = RadosUri::parse("rados:rbd/group").unwrap();
        let cluster = StoreCluster::new(&uri, Span::from_ms(1500));
        let settings = &cluster.access.options.settings;
        let limit = ("rados_osd_op_timeout".to_owned(), "2".to_owned());
        assert!(settings.contains(&limit), "{settings:?}");
    }
}
