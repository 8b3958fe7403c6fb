//! Connections to clusters, shared by the images of a process.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tenmil_base::{Error, Span};

use crate::ceph_error::ceph_error;
use crate::deadline::call_with_deadline;
use crate::librbd::{CephErrno, ConnectStep, Connection, Functions, PoolContext};
use crate::rbd_uri::ClusterAccess;

/// Connection to a cluster, shared by the devices with the same [`ClusterAccess`].
#[derive(Debug)]
pub(crate) struct Cluster {
    access: ClusterAccess,
    /// Taken when it is dropped.
    connection: Option<Arc<Connection>>,
    /// Open pools, by pool and namespace.
    pools: Mutex<Vec<(String, String, Weak<PoolContext>)>>,
    /// Whether devices that are opened from now on use a new connection.
    is_retired: AtomicBool,
    /// Addresses of the clients that this connection has blocklisted.
    blocklisted: Mutex<BTreeSet<String>>,
}

/// The open connections of the process. Locked while one is opened, so that devices that are opened at the same time
/// share it.
static CLUSTERS: Mutex<Vec<Weak<Cluster>>> = Mutex::new(Vec::new());

/// How much longer than the library's own limit a connection may take before it is left behind.
const MARGIN: Span = Span::from_secs(5);
/// Maximum time to close a connection.
const CLOSE_LIMIT: Span = Span::from_secs(10);
/// Maximum time to blocklist a client.
const BLOCKLIST_LIMIT: Span = Span::from_secs(10);
/// Time for which a client is blocklisted, in seconds: longer than a process stays stopped that is continued.
const BLOCKLIST_SECONDS: u32 = 24 * 3600;

impl Cluster {
    /// The open connection with this access, or a new one. Blocks.
    ///
    /// # Errors
    ///
    /// If librbd is missing, or the cluster cannot be reached.
    pub(crate) fn connect(
        functions: &'static Functions,
        access: &ClusterAccess,
    ) -> Result<Arc<Self>, Error> {
        let mut clusters = CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner);
        clusters.retain(|cluster| cluster.strong_count() > 0);
        let mut open = clusters.iter().filter_map(Weak::upgrade);
        if let Some(cluster) = open.find(|cluster| cluster.is_reached_by(functions, access)) {
            return Ok(cluster);
        }
        let cluster = Arc::new(Self::connect_unshared(functions, access)?);
        clusters.push(Arc::downgrade(&cluster));
        Ok(cluster)
    }

    /// A new connection that no device uses. Blocks.
    ///
    /// # Errors
    ///
    /// If the cluster cannot be reached.
    pub(crate) fn connect_unshared(
        functions: &'static Functions,
        access: &ClusterAccess,
    ) -> Result<Self, Error> {
        let options = access.options.clone();
        let limit = Span { ns: access.connect_timeout.ns.saturating_add(MARGIN.ns) };
        let call = move || Connection::connect(functions, &options);
        let connected = match call_with_deadline(limit, call)? {
            Some(connected) => connected,
            None => Err((ConnectStep::Connect, CephErrno(libc::ETIMEDOUT))),
        };
        let connection = connected.map_err(|(step, errno)| connect_error(access, &step, errno))?;
        let connection = Some(Arc::new(connection));
        let (is_retired, blocklisted) = (AtomicBool::new(false), Mutex::default());
        let (access, pools) = (access.clone(), Mutex::default());
        Ok(Self { access, connection, pools, is_retired, blocklisted })
    }

    /// The connections of this process that reach a cluster in this way.
    pub(crate) fn connected(access: &ClusterAccess) -> Vec<Arc<Self>> {
        Self::all().filter(|cluster| cluster.access == *access).collect()
    }

    /// Makes devices that are opened from now on use new connections.
    pub(crate) fn retire_all() {
        Self::all().for_each(|cluster| cluster.retire());
    }

    fn all() -> impl Iterator<Item = Arc<Self>> {
        let clusters = CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner);
        let open: Vec<_> = clusters.iter().filter_map(Weak::upgrade).collect();
        open.into_iter()
    }

    /// Makes devices that are opened from now on use a new connection: the cluster rejects this one, or will. Takes no lock,
    /// since a channel calls it.
    pub(crate) fn retire(&self) {
        self.is_retired.store(true, Ordering::Relaxed);
    }

    /// The identifier of the cluster.
    pub(crate) fn fsid(&self) -> &str {
        self.connection.as_ref().map_or("", |connection| connection.fsid())
    }

    /// Addresses of this client, as a blocklist has them.
    pub(crate) fn addresses(&self) -> &str {
        self.connection.as_ref().map_or("", |connection| connection.addresses())
    }

    /// Has the cluster reject the requests of a client, also those that it has sent. Blocks.
    ///
    /// # Errors
    ///
    /// If the client may not do that, or no monitor answers.
    pub(crate) fn blocklist(&self, addresses: &str) -> Result<(), Error> {
        let mut blocklisted = self.blocklisted.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(connection) = self.connection.clone().filter(|_| !blocklisted.contains(addresses))
        else {
            return Ok(());
        };
        let text = addresses.to_owned();
        let call = move || connection.blocklist(&text, BLOCKLIST_SECONDS);
        let late = Err(CephErrno(libc::ETIMEDOUT));
        call_with_deadline(BLOCKLIST_LIMIT, call)?.unwrap_or(late).map_err(|errno| {
            let error = ceph_error(format!("blocklist {addresses}"), errno);
            match errno.0 {
                libc::EACCES | libc::EPERM => error.with_hint(
                    "Give the client the capability `profile rbd` of the monitors: `ceph auth caps client.NAME mon \
                     'profile rbd' osd 'profile rbd'`.",
                ),
                _ => error,
            }
        })?;
        blocklisted.insert(addresses.to_owned());
        Ok(())
    }

    /// A pool and namespace, shared by its images.
    ///
    /// # Errors
    ///
    /// If there is no such pool.
    pub(crate) fn pool(&self, pool: &str, namespace: &str) -> Result<Arc<PoolContext>, Error> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|(_, _, context)| context.strong_count() > 0);
        let is_same =
            |(name, of, _): &&(String, String, Weak<PoolContext>)| name == pool && of == namespace;
        if let Some(context) = pools.iter().find(is_same).and_then(|(_, _, open)| open.upgrade()) {
            return Ok(context);
        }
        let Some(connection) = &self.connection else {
            return Err(Error::remote(format!("open pool {pool}: the connection is closed")));
        };
        let context = PoolContext::open(connection, pool, namespace)
            .map_err(|errno| ceph_error(format!("open pool {pool}"), errno))?;
        let context = Arc::new(context);
        pools.push((pool.to_owned(), namespace.to_owned(), Arc::downgrade(&context)));
        Ok(context)
    }

    fn is_reached_by(&self, functions: &'static Functions, access: &ClusterAccess) -> bool {
        let is_of = |connection: &Arc<Connection>| std::ptr::eq(connection.functions(), functions);
        let is_usable = !self.is_retired.load(Ordering::Relaxed) && self.access == *access;
        is_usable && self.connection.as_ref().is_some_and(is_of)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let connection = self.connection.take();
        // Without a thread, the connection is closed here when the closure is dropped.
        let _ = call_with_deadline(CLOSE_LIMIT, move || drop(connection));
    }
}

fn connect_error(access: &ClusterAccess, step: &ConnectStep, errno: CephErrno) -> Error {
    let options = &access.options;
    let conf = options.conf.as_deref().unwrap_or("/etc/ceph/ceph.conf or CEPH_CONF");
    match step {
        ConnectStep::Create => ceph_error(format!("open cluster {}", options.cluster), errno),
        ConnectStep::ReadConf => {
            let error = std::io::Error::from_raw_os_error(errno.0);
            Error::environment(format!("read the configuration of Ceph, {conf}: {error}"))
                .with_hint("Name the file with `conf=PATH`.")
        }
        ConnectStep::Set(key) => Error::usage(format!(
            "set the option {key} of Ceph: {}, expected an option and a value that it knows",
            std::io::Error::from_raw_os_error(errno.0)
        )),
        ConnectStep::Connect if errno.0 == libc::ENOENT => Error::environment(format!(
            "connect to the cluster of {conf} as {}: it names no monitor, or the client has no keyring",
            options.client
        ))
        .with_hint("Check `mon_host` and `keyring` in the configuration file, or name another with `conf=PATH`."),
        ConnectStep::Connect => ceph_error(
            format!("connect to the cluster of {conf} as {}", options.client),
            errno,
        ),
    }
}
