//! `tenmil volume` on images of a Ceph cluster: the same commands, carried out by the cluster.

use serde_json::{Value, json};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_rbd::images::{self, ImageRow};
use tenmil_rpc::pool_commands::format_bytes;

use super::super::pool::align_columns;
use super::{ByteSize, CreateArguments, DeleteArguments, ResizeArguments, VolumeCommand};

/// What a command did: one line, and the image or snapshot.
struct ImageResult {
    is_changed: bool,
    text: String,
    image: String,
}

/// Runs a command whose volume is an image of a cluster, and returns the text to print; `None` if it is not.
pub(super) fn run_if_image(command: &VolumeCommand) -> Result<Option<String>, Error> {
    let uri = match command {
        VolumeCommand::Create(it) => &it.volume,
        VolumeCommand::Delete(it) => &it.volume,
        VolumeCommand::Resize(it) => &it.volume,
        VolumeCommand::Rename(it) | VolumeCommand::Snapshot(it) | VolumeCommand::Rollback(it) => {
            &it.volume
        }
        VolumeCommand::Clone(it) => &it.volume,
        VolumeCommand::Decouple(it) => &it.volume,
        VolumeCommand::Inflate(it) => &it.volume,
        VolumeCommand::Diff(it) => &it.volume,
        VolumeCommand::Send(it) => &it.volume,
        VolumeCommand::Receive(it) => &it.volume,
        VolumeCommand::List(it) => &it.store,
    };
    if !images::is_image(uri) {
        return Ok(None);
    }
    let (result, is_json) = match command {
        VolumeCommand::Create(it) => (create(uri, it)?, it.json),
        VolumeCommand::Delete(it) => (delete(uri, it)?, it.json),
        VolumeCommand::Resize(it) => (resize(uri, it)?, it.json),
        VolumeCommand::Snapshot(it) => {
            let snapshot = snapshot_uri(uri, &it.name);
            images::create_snapshot(&snapshot)?;
            (done("snapshot", &snapshot), it.json)
        }
        VolumeCommand::Rollback(it) => {
            images::roll_back(&snapshot_uri(uri, &it.name))?;
            (done(&format!("rolled back to {}", it.name), uri), it.json)
        }
        VolumeCommand::Clone(it) => {
            let Some(name) = it.name.as_deref().filter(|_| it.from.is_none()) else {
                return Err(not_for_images(
                    "clone --from",
                    uri,
                    "a snapshot and the name of the clone",
                ));
            };
            let clone = sibling_uri(uri, name);
            images::clone(uri, &clone)?;
            (done("cloned", &clone), it.json)
        }
        VolumeCommand::Decouple(it) => {
            if it.limit_bytes.is_some() {
                return Err(not_for_images(
                    "--limit-bytes",
                    uri,
                    "none: the cluster limits the rate",
                ));
            }
            images::flatten(uri)?;
            (done("detached from its parent", uri), it.json)
        }
        VolumeCommand::List(it) => return list(uri, it.json).map(Some),
        VolumeCommand::Rename(_) => return Err(not_for_images("rename", uri, "`rbd rename`")),
        VolumeCommand::Inflate(_) => {
            return Err(not_for_images(
                "inflate",
                uri,
                "`rbd sparsify` or a thick image of `rbd create`",
            ));
        }
        VolumeCommand::Diff(_) => return Err(not_for_images("diff", uri, "`rbd diff`")),
        VolumeCommand::Send(_) | VolumeCommand::Receive(_) => {
            return Err(not_for_images(
                "send and receive",
                uri,
                "`rbd export-diff` and `rbd import-diff`, or `tenmil copy`",
            ));
        }
    };
    let ImageResult { is_changed, text, image } = result;
    if is_json {
        return Ok(Some(format!("{:#}\n", json!({ "changed": is_changed, "image": image }))));
    }
    Ok(Some(text + "\n"))
}

fn create(uri: &Uri, it: &CreateArguments) -> Result<ImageResult, Error> {
    if it.checksums || it.thick {
        return Err(not_for_images(
            "--checksums and --thick",
            uri,
            "neither: the cluster stores checksums",
        ));
    }
    let ByteSize(size_bytes) = it.size;
    images::create(uri, size_bytes, it.cluster_size.map(|ByteSize(bytes)| bytes))?;
    Ok(done(&format!("created, {}", format_bytes(size_bytes)), uri))
}

fn delete(uri: &Uri, it: &DeleteArguments) -> Result<ImageResult, Error> {
    if it.orphan {
        return Err(not_for_images(
            "--orphan",
            uri,
            "none: detach the clones by `tenmil volume decouple`",
        ));
    }
    let is_deleted = match uri.path().contains('@') {
        true => images::delete_snapshot(uri, !it.if_exists)?,
        false => images::delete(uri, !it.if_exists)?,
    };
    let what = if is_deleted { "deleted" } else { "does not exist" };
    Ok(ImageResult { is_changed: is_deleted, ..done(what, uri) })
}

fn resize(uri: &Uri, it: &ResizeArguments) -> Result<ImageResult, Error> {
    let ByteSize(size_bytes) = it.size;
    images::resize(uri, size_bytes, it.shrink)?;
    Ok(done(&format!("resized to {}", format_bytes(size_bytes)), uri))
}

fn list(uri: &Uri, is_json: bool) -> Result<String, Error> {
    let rows = images::list(uri)?;
    if is_json {
        let images: Vec<Value> = rows.iter().map(row_json).collect();
        return Ok(format!("{:#}\n", json!({ "images": images })));
    }
    let mut lines = vec![["image", "size", "objects", "snapshots"].map(String::from)];
    for ImageRow { image, size_bytes, object_bytes, snapshots } in &rows {
        let snapshots: Vec<&str> = snapshots.iter().map(|snapshot| &*snapshot.name).collect();
        lines.push([
            image.name.clone(),
            format_bytes(*size_bytes),
            format_bytes(*object_bytes),
            snapshots.join(" "),
        ]);
    }
    Ok(align_columns(&lines))
}

fn row_json(row: &ImageRow) -> Value {
    let snapshots: Vec<Value> = row
        .snapshots
        .iter()
        .map(|snapshot| {
            json!({ "name": snapshot.name, "id": snapshot.id, "size_bytes": snapshot.size_bytes })
        })
        .collect();
    json!({
        "name": row.image.name,
        "id": row.image.id,
        "size_bytes": row.size_bytes,
        "object_bytes": row.object_bytes,
        "snapshots": snapshots,
    })
}

fn done(what: &str, uri: &Uri) -> ImageResult {
    ImageResult { is_changed: true, text: format!("{uri:#}: {what}"), image: uri.to_string() }
}

fn not_for_images(what: &str, uri: &Uri, expected: &str) -> Error {
    Error::usage(format!(
        "{uri:#}: {what} is for volumes of a pool, expected for an image of Ceph {expected}"
    ))
}

/// The snapshot `name` of an image.
fn snapshot_uri(image: &Uri, name: &str) -> Uri {
    image.with_path(format!("{}@{name}", image.path()))
}

/// The image `name` in the pool and namespace of another.
fn sibling_uri(image: &Uri, name: &str) -> Uri {
    let path = image.path().split('@').next().unwrap_or_default();
    let pool = path.rsplit_once('/').map_or("", |(pool, _)| pool);
    image.with_path(format!("{pool}/{name}"))
}

#[cfg(test)]
mod tests {
    use super::{sibling_uri, snapshot_uri};

    #[test]
    fn names_in_the_same_pool_keep_its_namespace_and_options() {
        let uri = |text: &str| text.parse::<tenmil_block::uri::Uri>().unwrap();
        let snapshot = snapshot_uri(&uri("rbd:p/n/i?user=u"), "monday");
        assert_eq!(snapshot, uri("rbd:p/n/i@monday?user=u"));
        assert_eq!(sibling_uri(&snapshot, "j"), uri("rbd:p/n/j?user=u"));
        assert_eq!(sibling_uri(&uri("rbd:p/i@a/b"), "j"), uri("rbd:p/j"));
    }
}
