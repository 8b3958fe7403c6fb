//! Errors of Ceph by name: what they mean, whose fault they are, and what to do.

use std::fmt;

use tenmil_base::{Error, ErrorCategory, IoStatus, Operation};

use crate::librbd::CephErrno;

/// Why an image cannot be used any more. The device is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageLoss {
    /// The cluster rejects this client.
    Blocklisted,
    /// Another client has the exclusive lock.
    LockLost,
    /// The image, or its pool, does not exist any more.
    Deleted,
}

impl ImageLoss {
    /// The loss that an error of a request or of the watch means, if it means one. `is_writable`: the image was opened to be
    /// written.
    pub(crate) const fn from_errno(errno: CephErrno, is_writable: bool) -> Option<Self> {
        match errno.0 {
            libc::ESHUTDOWN => Some(Self::Blocklisted),
            libc::EROFS if is_writable => Some(Self::LockLost),
            libc::ENOENT => Some(Self::Deleted),
            _ => None,
        }
    }
}

impl fmt::Display for ImageLoss {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Blocklisted => {
                "this client is blocklisted: the cluster rejects its requests (`ceph osd blocklist ls`), \
                 because another client has taken the image over or an administrator has excluded it"
            }
            Self::LockLost => {
                "the exclusive lock of the image is lost: another client has it, or it was broken by \
                 `rbd lock remove`"
            }
            Self::Deleted => "the image or its pool was deleted",
        })
    }
}

/// The error of a call: what was being done, and what the number means.
pub(crate) fn ceph_error(doing: impl fmt::Display, errno: CephErrno) -> Error {
    let (category, meaning, hint) = meaning_of(errno);
    let meaning = match meaning {
        Some(meaning) => meaning.to_owned(),
        None => std::io::Error::from_raw_os_error(errno.0).to_string(),
    };
    let error = Error::new(category, format!("{doing}: {meaning}"));
    match hint {
        Some(hint) => error.with_hint(hint),
        None => error,
    }
}

fn meaning_of(errno: CephErrno) -> (ErrorCategory, Option<&'static str>, Option<&'static str>) {
    use ErrorCategory::{Environment, Remote, Usage};
    match errno.0 {
        libc::ENOENT => (
            Usage,
            Some("the cluster has none of that name"),
            Some(
                "`ceph osd pool ls` lists pools, `rbd ls POOL` images and `rbd snap ls POOL/IMAGE` snapshots.",
            ),
        ),
        libc::EPERM | libc::EACCES => (
            Environment,
            Some("the cluster denies it to this client"),
            Some(
                "Check the client's name (`user=`), its keyring and its capabilities: `ceph auth get \
                 client.NAME` shows `profile rbd` for what it may use.",
            ),
        ),
        libc::ETIMEDOUT => (
            Remote,
            Some(
                "the cluster has not answered in time: no quorum of monitors, or no OSD for an object",
            ),
            Some(
                "`ceph -s` shows the state of the cluster; `mon_host` in the configuration file names the \
                 monitors.",
            ),
        ),
        libc::ESHUTDOWN => (
            Remote,
            Some("this client is blocklisted"),
            Some(
                "`ceph osd blocklist ls` shows the entry and its end; `ceph osd blocklist rm ADDRESS` \
                 removes it.",
            ),
        ),
        libc::EROFS => (
            Remote,
            Some("another client keeps the exclusive lock"),
            Some(
                "`rbd status POOL/IMAGE` shows the clients that have the image open; end the other one, open the \
                 image with `read-only=yes`, or pass the lock on with `lock=auto` on both.",
            ),
        ),
        libc::EBUSY => (
            Remote,
            Some("it is in use by a client, or a clone depends on it"),
            Some(
                "`rbd status POOL/IMAGE` shows the clients, `rbd children POOL/IMAGE` the clones.",
            ),
        ),
        libc::ENOTEMPTY => (
            Usage,
            Some("the image has snapshots"),
            Some("Delete them first: `tenmil volume delete rbd:POOL/IMAGE@SNAPSHOT`."),
        ),
        libc::ENOSPC => (
            Remote,
            Some("the cluster or the pool is full"),
            Some("`ceph df` shows the space of each pool."),
        ),
        libc::EDQUOT => (
            Remote,
            Some("the quota of the pool is reached"),
            Some("`ceph osd pool get-quota POOL` shows it."),
        ),
        libc::EAGAIN => (Remote, Some("other clients have changed it in each attempt"), None),
        libc::EEXIST => (Usage, Some("there is one of that name already"), None),
        libc::ENOTCONN => (
            Environment,
            Some("no connection to a monitor can be made"),
            Some("`mon_host` in the configuration file names the monitors."),
        ),
        _ => (Remote, None, None),
    }
}

/// The status of a request that has failed. `is_writable`: the image was opened to be written.
pub(crate) const fn status_of_errno(
    errno: CephErrno,
    operation: Operation,
    is_writable: bool,
) -> IoStatus {
    match (errno.0, operation) {
        (libc::EILSEQ, Operation::CompareAndWrite) => IoStatus::COMPARE_FAILURE,
        (libc::ENOSPC | libc::EDQUOT, _) => IoStatus::CAPACITY_EXCEEDED,
        (libc::ESHUTDOWN | libc::ENOENT, _) => IoStatus::NO_DEVICE,
        (libc::EROFS, _) if is_writable => IoStatus::NO_DEVICE,
        (libc::EROFS, _) => IoStatus::WRITE_PROTECTED,
        (libc::ETIMEDOUT | libc::ENOTCONN, _) => IoStatus::PATH_ERROR,
        (libc::EINVAL | libc::EOPNOTSUPP, _) => IoStatus::INVALID_FIELD,
        (libc::ENOMEM, _) => IoStatus::INTERNAL_ERROR,
        (_, Operation::Read) => IoStatus::UNRECOVERED_READ,
        _ => IoStatus::WRITE_FAULT,
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{ErrorCategory, IoStatus, Operation};

    use super::{CephErrno, ImageLoss, ceph_error, status_of_errno};

    #[test]
    fn error_names_its_cause_and_what_to_do() {
        for (errno, category, meaning) in [
            (libc::ESHUTDOWN, ErrorCategory::Remote, "blocklisted"),
            (libc::ENOSPC, ErrorCategory::Remote, "full"),
            (libc::EDQUOT, ErrorCategory::Remote, "quota"),
            (libc::ETIMEDOUT, ErrorCategory::Remote, "no quorum"),
            (libc::ENOENT, ErrorCategory::Usage, "none of that name"),
            (libc::EACCES, ErrorCategory::Environment, "denies"),
            (libc::EROFS, ErrorCategory::Remote, "exclusive lock"),
        ] {
            let error = ceph_error("open rbd:p/i", CephErrno(errno));
            assert_eq!(error.category, category, "{error}");
            assert!(
                error.text.starts_with("open rbd:p/i: ") && error.text.contains(meaning),
                "{error}"
            );
            assert!(error.hint().is_some_and(|hint| hint.contains('`')), "{error}");
        }
        let other = ceph_error("open rbd:p/i", CephErrno(libc::EIO));
        assert!(other.text.contains("Input/output error"), "{other}");
    }

    #[test]
    fn loss_of_the_image_is_told_from_a_failed_request() {
        let loss = |errno, is_writable| ImageLoss::from_errno(CephErrno(errno), is_writable);
        assert_eq!(loss(libc::ESHUTDOWN, false), Some(ImageLoss::Blocklisted));
        assert_eq!(loss(libc::EROFS, true), Some(ImageLoss::LockLost));
        assert_eq!(loss(libc::EROFS, false), None, "a write to a snapshot loses nothing");
        assert_eq!(loss(libc::ENOENT, true), Some(ImageLoss::Deleted));
        for errno in [libc::EIO, libc::ENOSPC, libc::ETIMEDOUT, libc::EILSEQ] {
            assert_eq!(loss(errno, true), None);
        }
    }

    #[test]
    fn status_tells_a_full_pool_from_a_lost_path_and_a_failed_medium() {
        let status = |errno, operation| status_of_errno(CephErrno(errno), operation, true);
        assert_eq!(status(libc::ENOSPC, Operation::Write), IoStatus::CAPACITY_EXCEEDED);
        assert_eq!(status(libc::ETIMEDOUT, Operation::Read), IoStatus::PATH_ERROR);
        assert_eq!(status(libc::EILSEQ, Operation::CompareAndWrite), IoStatus::COMPARE_FAILURE);
        assert_eq!(status(libc::EIO, Operation::Read), IoStatus::UNRECOVERED_READ);
        assert_eq!(status(libc::EIO, Operation::Flush), IoStatus::WRITE_FAULT);
        assert_eq!(status(libc::ESHUTDOWN, Operation::Write), IoStatus::NO_DEVICE);
        let read_only = status_of_errno(CephErrno(libc::EROFS), Operation::Write, false);
        assert_eq!(read_only, IoStatus::WRITE_PROTECTED);
    }
}
