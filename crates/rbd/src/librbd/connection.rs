//! Connection to a cluster, and its pools.

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use super::functions::{Functions, Ioctx, Rados};
use super::{CephErrno, c_string, check, owned_text, text_of};

/// Connection to a cluster. Dropping it closes it, which waits for the cluster for a bounded time.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(super) functions: &'static Functions,
    pub(super) handle: Rados,
    fsid: String,
    addresses: String,
}

/// What a connection is opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionOptions {
    /// Name of the cluster, which is part of the default paths.
    pub(crate) cluster: String,
    /// Name of the client, such as `client.admin`.
    pub(crate) client: String,
    /// The configuration file; `None` for those that Ceph searches.
    pub(crate) conf: Option<String>,
    /// Configuration options, which override the file.
    pub(crate) settings: Vec<(String, String)>,
}

/// A step of opening a connection that failed, for the error message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ConnectStep {
    /// Making the handle.
    Create,
    /// Reading the configuration file.
    ReadConf,
    /// Setting this option.
    Set(String),
    /// Connecting to the monitors.
    Connect,
}

/// Pool of a cluster, and a namespace in it.
#[derive(Debug)]
pub(crate) struct PoolContext {
    pub(super) connection: Arc<Connection>,
    pub(super) handle: Ioctx,
}

// SAFETY: `rados_t` may be used by any thread: the functions of librados take its locks themselves.
unsafe impl Send for Connection {}
// SAFETY: as above.
unsafe impl Sync for Connection {}
// SAFETY: `rados_ioctx_t` may be used by any thread once its namespace is set, which happens before
// `PoolContext::open` returns.
unsafe impl Send for PoolContext {}
// SAFETY: as above.
unsafe impl Sync for PoolContext {}

/// Bytes of a cluster's identifier as text, with the NUL byte.
const FSID_BYTES: usize = 37;

impl Connection {
    /// Connects to a cluster. Blocks until a monitor has answered, or for the time that the option
    /// `client_mount_timeout` permits.
    ///
    /// # Errors
    ///
    /// The step that failed, and the error of the library.
    pub(crate) fn connect(
        functions: &'static Functions,
        options: &ConnectionOptions,
    ) -> Result<Self, (ConnectStep, CephErrno)> {
        let create = |errno| (ConnectStep::Create, errno);
        let cluster = c_string(&options.cluster).map_err(create)?;
        let client = c_string(&options.client).map_err(create)?;
        let mut handle: Rados = ptr::null_mut();
        // SAFETY: both names are C strings, and the handle is stored to a variable that outlives the call.
        let created = unsafe {
            (functions.rados_create2)(&raw mut handle, cluster.as_ptr(), client.as_ptr(), 0)
        };
        check(created).map_err(create)?;
        // From here on, dropping it frees the handle.
        let (fsid, addresses) = (String::new(), String::new());
        let mut connection = Self { functions, handle, fsid, addresses };
        connection.read_conf(options.conf.as_deref()).map_err(|e| (ConnectStep::ReadConf, e))?;
        for (key, value) in &options.settings {
            connection.set(key, value).map_err(|e| (ConnectStep::Set(key.clone()), e))?;
        }
        let connect = |errno| (ConnectStep::Connect, errno);
        // SAFETY: the handle was created above and is not connected yet.
        check(unsafe { (functions.rados_connect)(handle) }).map_err(connect)?;
        connection.fsid = connection.read_fsid().map_err(connect)?;
        connection.addresses = connection.read_addresses().map_err(connect)?;
        Ok(connection)
    }

    /// The functions that it was opened with.
    pub(crate) fn functions(&self) -> &'static Functions {
        self.functions
    }

    /// The identifier of the cluster.
    pub(crate) fn fsid(&self) -> &str {
        &self.fsid
    }

    /// Addresses of this client, as a blocklist has them. No other client has had them.
    pub(crate) fn addresses(&self) -> &str {
        &self.addresses
    }

    /// Has the cluster reject the requests of a client from now on, also those that it has sent. Requests of this connection
    /// are executed after that. Blocks until a monitor has answered.
    ///
    /// # Errors
    ///
    /// EINVAL if these are no addresses, EACCES without the capability.
    pub(crate) fn blocklist(&self, addresses: &str, seconds: u32) -> Result<(), CephErrno> {
        let addresses = c_string(addresses)?;
        let (handle, text) = (self.handle, addresses.as_ptr().cast_mut());
        // SAFETY: the handle is connected; the text is a C string, which the function copies.
        check(unsafe { (self.functions.rados_blocklist_add)(handle, text, seconds) })?;
        // An OSD executes no request of this client before it has the map that this client has.
        // SAFETY: the handle is connected.
        check(unsafe { (self.functions.rados_wait_for_latest_osdmap)(handle) }).map(drop)
    }

    fn read_addresses(&self) -> Result<String, CephErrno> {
        let mut text = ptr::null_mut();
        // SAFETY: the handle is connected, and the address is stored to a variable that outlives the call.
        check(unsafe { (self.functions.rados_getaddrs)(self.handle, &raw mut text) })?;
        let addresses = owned_text(text);
        // SAFETY: the library has allocated the text, which is freed once.
        unsafe { (self.functions.rados_buffer_free)(text) };
        Ok(addresses)
    }

    fn read_conf(&self, path: Option<&str>) -> Result<(), CephErrno> {
        let path = path.map(c_string).transpose()?;
        let path = path.as_ref().map_or(ptr::null(), |path| path.as_ptr());
        // SAFETY: the handle is open; the path is a C string, or null for the files that Ceph searches.
        check(unsafe { (self.functions.rados_conf_read_file)(self.handle, path) }).map(drop)
    }

    fn set(&self, key: &str, value: &str) -> Result<(), CephErrno> {
        let (key, value) = (c_string(key)?, c_string(value)?);
        // SAFETY: the handle is open; key and value are C strings.
        check(unsafe { (self.functions.rados_conf_set)(self.handle, key.as_ptr(), value.as_ptr()) })
            .map(drop)
    }

    fn read_fsid(&self) -> Result<String, CephErrno> {
        let mut text = [0_u8; FSID_BYTES];
        let (address, len) = (text.as_mut_ptr().cast(), text.len());
        // SAFETY: the handle is connected, and the buffer has the length that is passed with it.
        check(unsafe { (self.functions.rados_cluster_fsid)(self.handle, address, len) })?;
        Ok(text_of(&text))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: the handle was created by `connect`; pool contexts and images hold this connection, so
        // none of them is open any more.
        unsafe { (self.functions.rados_shutdown)(self.handle) };
    }
}

impl PoolContext {
    /// Opens a pool; an empty namespace is the default one.
    ///
    /// # Errors
    ///
    /// ENOENT if there is no such pool.
    pub(crate) fn open(
        connection: &Arc<Connection>,
        pool: &str,
        namespace: &str,
    ) -> Result<Self, CephErrno> {
        let functions = connection.functions;
        let (pool, namespace) = (c_string(pool)?, c_string(namespace)?);
        let mut handle: Ioctx = ptr::null_mut();
        // SAFETY: the connection is open, the name is a C string, and the handle is stored to a variable
        // that outlives the call.
        let created = unsafe {
            (functions.rados_ioctx_create)(connection.handle, pool.as_ptr(), &raw mut handle)
        };
        check(created)?;
        let context = Self { connection: Arc::clone(connection), handle };
        context.set_namespace(&namespace);
        // Otherwise writes to a full pool wait until it has room, and their hosts time out without a reason.
        // SAFETY: the handle was created above.
        unsafe { (functions.rados_set_pool_full_try)(handle) };
        Ok(context)
    }

    /// The number of the pool, which is never used again.
    pub(crate) fn pool_id(&self) -> i64 {
        // SAFETY: the handle is open.
        unsafe { (self.connection.functions.rados_ioctx_get_id)(self.handle) }
    }

    fn set_namespace(&self, namespace: &CString) {
        // SAFETY: the handle is open and not shared yet; the namespace is a C string, which is copied.
        unsafe {
            (self.connection.functions.rados_ioctx_set_namespace)(self.handle, namespace.as_ptr())
        };
    }
}

impl Drop for PoolContext {
    fn drop(&mut self) {
        // SAFETY: the handle was created by `open`; images hold their pool context, so none is open any more.
        unsafe { (self.connection.functions.rados_ioctx_destroy)(self.handle) };
    }
}
