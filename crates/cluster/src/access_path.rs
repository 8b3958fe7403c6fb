//! Access of a host to its blocks: paths, or a mirror over the paths of several legs.

use tenmil_base::{ChannelWakeup, Instant, IoChannel, Segment};
use tenmil_dma::RegionTable;
use tenmil_nvme_fabrics::PathEvent;

use crate::disk_access::MultipathAccess;
use crate::mirror_legs::MirrorAccess;

/// Paths to one subsystem, or a mirror.
pub(crate) enum DiskOrMirrorAccess {
    Paths(Box<MultipathAccess>),
    Mirror(Box<MirrorAccess>),
}

impl DiskOrMirrorAccess {
    /// All memory of the host.
    pub(crate) fn regions(&self) -> &RegionTable {
        match self {
            Self::Paths(link) => &link.regions,
            Self::Mirror(legs) => &legs.regions,
        }
    }

    /// That for data.
    pub(crate) fn data_segment(&self) -> Segment {
        match self {
            Self::Paths(link) => link.memory,
            Self::Mirror(legs) => legs.memory,
        }
    }

    /// The queue, once there is one.
    pub(crate) fn multipath_queue(&mut self) -> &mut Option<Box<dyn IoChannel>> {
        match self {
            Self::Paths(link) => &mut link.queue,
            Self::Mirror(legs) => &mut legs.queue,
        }
    }

    /// Takes the queue, if it has to be requested. Returns whether it has just become available.
    pub(crate) fn take_multipath_queue(&mut self) -> bool {
        match self {
            Self::Paths(link) => link.take_new_queue(),
            Self::Mirror(_) => false,
        }
    }

    /// What has happened to a path, and of which leg.
    pub(crate) fn next_path_event(&mut self, now: Instant) -> Option<(usize, PathEvent)> {
        match self {
            Self::Paths(link) => Some((0, link.multipath.poll(now)?)),
            Self::Mirror(legs) => legs.next_event(now),
        }
    }

    /// Time of the next step if nothing arrives.
    pub(crate) fn wake_at(&mut self, now: Instant) -> Instant {
        let queue = self.multipath_queue().as_ref().map_or(Instant::NEVER, ChannelWakeup::wake_at);
        let paths = match self {
            Self::Paths(link) => link.multipath.wake_at(now),
            Self::Mirror(legs) => legs.wake_at(now),
        };
        paths.min(queue)
    }

    /// Gives the queue up and disconnects.
    pub(crate) fn shut_down(&mut self, now: Instant) {
        match self {
            Self::Paths(link) => {
                link.queue = None;
                link.multipath.shut_down(now);
            }
            Self::Mirror(legs) => legs.shut_down(now),
        }
    }

    /// Whether it is disconnecting.
    pub(crate) fn is_shutting_down(&mut self) -> bool {
        match self {
            Self::Paths(link) => link.multipath.is_shutting_down(),
            Self::Mirror(legs) => legs.is_shutting_down(),
        }
    }

    /// The legs, if it is a mirror.
    pub(crate) fn mirror_legs(&mut self) -> Option<&mut MirrorAccess> {
        match self {
            Self::Paths(_) => None,
            Self::Mirror(legs) => Some(legs),
        }
    }
}
