//! Exclusive writing that a device enforces: an NVMe reservation of type Write Exclusive.

use crate::Error;

/// The reservation of a namespace (Base 2.1 §8.1.22). It belongs to a host, not to a connection: all channels
/// of the host write, those of other hosts read, and their writes and flushes complete with
/// [`IoStatus::RESERVATION_CONFLICT`](crate::IoStatus::RESERVATION_CONFLICT). The calls block: never on the path
/// of an I/O.
pub trait ReservationControl: Send + Sync {
    /// The holder of a reservation of any type, if there is one.
    ///
    /// # Errors
    ///
    /// The command sent to the device, and its response.
    fn holder(&self) -> Result<Option<ReservationHolder>, Error>;

    /// Registers this host under `key`, in place of a key that it has, and acquires Write Exclusive. With
    /// `preempted`, the registrant with that key loses its registration and the reservation, and its commands
    /// in flight are aborted. False if another host holds the reservation then; this host is not registered
    /// in that case.
    ///
    /// # Errors
    ///
    /// The command sent to the device, and its response.
    fn acquire(&self, key: u64, preempted: Option<u64>) -> Result<bool, Error>;

    /// Releases the reservation that this host holds under `key`, and unregisters this host. If this host is
    /// registered under another key, nothing changes.
    ///
    /// # Errors
    ///
    /// The command sent to the device, and its response.
    fn release_and_unregister(&self, key: u64) -> Result<(), Error>;
}

/// The holder of a reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationHolder {
    /// It is this host.
    pub is_this_host: bool,
    /// The type is Write Exclusive.
    pub is_write_exclusive: bool,
    /// The key that it is registered under.
    pub key: u64,
    /// Its host identifier, as text.
    pub host: String,
}
