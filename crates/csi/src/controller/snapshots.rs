//! Snapshots, and groups of snapshots that are taken at one point in time.

use super::{Controller, ListPage, message_size, page_of};
use crate::messages::{
    CreateSnapshotRequest, CreateVolumeGroupSnapshotRequest, ListSnapshotsRequest,
    ListSnapshotsResponse, Snapshot, SnapshotEntry, Timestamp, VolumeGroupSnapshot,
    VolumeGroupSnapshotIdRequest, VolumeGroupSnapshotResponse,
};
use crate::names::{GroupId, SnapshotId, VolumeId};
use crate::parameters::check_no_parameters;
use crate::status::{CallResult, Status, check_present};
use crate::storage_api::{PoolVolume, StorageApi};

/// Group snapshot with its members.
type FoundGroup = (GroupId, Vec<(SnapshotId, PoolVolume)>);

impl<A: StorageApi> Controller<'_, A> {
    pub(crate) fn create_snapshot(
        &mut self,
        request: &CreateSnapshotRequest,
    ) -> CallResult<SnapshotEntry> {
        check_present("name", &request.name)?;
        check_present("source_volume_id", &request.source_volume_id)?;
        check_no_parameters(&request.parameters)?;
        self.check_topology(request.accessibility_requirements.as_ref())?;
        let source = VolumeId::parse(&request.source_volume_id);
        for pool in self.api.pools()? {
            for (id, found) in self.snapshots_of_pool(&pool.uuid)? {
                if !id.is_called(&request.name) {
                    continue;
                }
                if source.as_ref() != Some(&id.source()) {
                    let text = format!(
                        "snapshot {id}: of volume {}, expected of {}",
                        id.source(),
                        request.source_volume_id
                    );
                    return Err(Status::already_exists(text));
                }
                return Ok(self.snapshot_entry(&id, &found));
            }
        }
        let (source, pool, volume) = self.expect_volume(&request.source_volume_id)?;
        let id = SnapshotId::new(&source, &request.name, self.now_s);
        let pair = (volume.name.clone(), id.pool_name());
        self.api.snapshot_volumes(&pool.uuid, &[pair])?;
        Ok(self.snapshot_entry(&id, &volume))
    }

    pub(crate) fn delete_snapshot(&mut self, text: &str) -> CallResult<()> {
        check_present("snapshot_id", text)?;
        let Some(id) = SnapshotId::parse(text) else { return Ok(()) };
        if let Some(group) = id.group() {
            let text = format!("snapshot {id}: belongs to the group snapshot {group}");
            return Err(Status::invalid_argument(text));
        }
        self.open_pool(&id.pool)?;
        self.api.delete_volume(&id.pool, &id.pool_name())
    }

    pub(crate) fn get_snapshot(&mut self, text: &str) -> CallResult<SnapshotEntry> {
        check_present("snapshot_id", text)?;
        let none = || Status::not_found(format!("snapshot `{text}`: does not exist"));
        let id = SnapshotId::parse(text).ok_or_else(none)?;
        self.open_pool(&id.pool)?;
        let all = self.snapshots_of_pool(&id.pool)?;
        let (id, found) = all.into_iter().find(|(other, _)| *other == id).ok_or_else(none)?;
        Ok(self.snapshot_entry(&id, &found))
    }

    pub(crate) fn list_snapshots(
        &mut self,
        request: &ListSnapshotsRequest,
    ) -> CallResult<ListSnapshotsResponse> {
        let is_wanted = |wanted: &str, found: &dyn std::fmt::Display| {
            wanted.is_empty() || wanted == found.to_string()
        };
        let mut all = Vec::new();
        for pool in self.api.pools()? {
            for (id, found) in self.snapshots_of_pool(&pool.uuid)? {
                let is_it = is_wanted(&request.snapshot_id, &id)
                    && is_wanted(&request.source_volume_id, &id.source());
                if is_it {
                    all.push((id.to_string(), self.snapshot_entry(&id, &found)));
                }
            }
        }
        let is_id = |token: &str| SnapshotId::parse(token).is_some();
        let ListPage { entries, next_token } =
            page_of(all, (&request.starting_token, request.max_entries), is_id)?;
        Ok(ListSnapshotsResponse { entries, next_token })
    }

    pub(crate) fn create_group_snapshot(
        &mut self,
        request: &CreateVolumeGroupSnapshotRequest,
    ) -> CallResult<VolumeGroupSnapshotResponse> {
        check_present("name", &request.name)?;
        check_no_parameters(&request.parameters)?;
        let Some(first) = request.source_volume_ids.first() else {
            return Err(Status::invalid_argument("source_volume_ids: missing"));
        };
        let mut sources = Vec::new();
        for text in &request.source_volume_ids {
            let none = || Status::not_found(format!("volume `{text}`: does not exist"));
            sources.push(VolumeId::parse(text).ok_or_else(none)?);
        }
        sources.sort();
        sources.dedup();
        if let Some(other) = sources.iter().find(|other| other.pool != sources[0].pool) {
            let text = format!(
                "volumes {first} and {other}: in two pools, which have no common point in time; expected one"
            );
            return Err(Status::failed_precondition(text));
        }
        let pool = self.open_pool(&sources[0].pool)?;
        if let Some((group, members)) =
            self.find_group(&pool.uuid, |id| id.is_called(&request.name))?
        {
            let mut found: Vec<_> = members.iter().map(|(id, _)| id.source()).collect();
            found.sort();
            if found != sources {
                let found: Vec<_> = found.iter().map(ToString::to_string).collect();
                let text = format!("group snapshot {group}: of volumes {}", found.join(", "));
                return Err(Status::already_exists(text));
            }
            return Ok(self.group_response(&group, &members));
        }
        let volumes = self.api.volumes(&pool.uuid)?;
        let group = GroupId::new(&pool.uuid, &request.name, self.now_s);
        let mut members = Vec::new();
        for source in &sources {
            let name = source.pool_name();
            let volume = volumes.iter().find(|one| one.name == name && !one.is_snapshot);
            let none = || Status::not_found(format!("volume `{source}`: does not exist"));
            let volume = volume.ok_or_else(none)?.clone();
            members.push((SnapshotId::of_group(&group, source), volume));
        }
        let pair = |(id, volume): &(SnapshotId, PoolVolume)| (volume.name.clone(), id.pool_name());
        let pairs: Vec<_> = members.iter().map(pair).collect();
        self.api.snapshot_volumes(&pool.uuid, &pairs)?;
        Ok(self.group_response(&group, &members))
    }

    pub(crate) fn delete_group_snapshot(
        &mut self,
        request: &VolumeGroupSnapshotIdRequest,
    ) -> CallResult<()> {
        check_present("group_snapshot_id", &request.group_snapshot_id)?;
        let Some(group) = GroupId::parse(&request.group_snapshot_id) else { return Ok(()) };
        self.open_pool(&group.pool)?;
        let found = self.find_group(&group.pool, |other| *other == group)?;
        for (id, _) in found.map(|(_, members)| members).unwrap_or_default() {
            self.api.delete_volume(&group.pool, &id.pool_name())?;
        }
        Ok(())
    }

    pub(crate) fn get_group_snapshot(
        &mut self,
        request: &VolumeGroupSnapshotIdRequest,
    ) -> CallResult<VolumeGroupSnapshotResponse> {
        let text = &request.group_snapshot_id;
        check_present("group_snapshot_id", text)?;
        let none = || Status::not_found(format!("group snapshot `{text}`: does not exist"));
        let group = GroupId::parse(text).ok_or_else(none)?;
        self.open_pool(&group.pool)?;
        let found = self.find_group(&group.pool, |other| *other == group)?;
        let (group, members) = found.ok_or_else(none)?;
        let is_member = |id: &String| members.iter().any(|(member, _)| member.to_string() == *id);
        if let Some(other) = request.snapshot_ids.iter().find(|id| !is_member(id)) {
            let text = format!("snapshot_ids: `{other}` is not of the group snapshot {group}");
            return Err(Status::invalid_argument(text));
        }
        Ok(self.group_response(&group, &members))
    }

    /// The group snapshot of a pool that `is_it` selects, with its members.
    fn find_group(
        &mut self,
        pool: &str,
        is_it: impl Fn(&GroupId) -> bool,
    ) -> CallResult<Option<FoundGroup>> {
        let all = self.snapshots_of_pool(pool)?.into_iter();
        let members: Vec<_> =
            all.filter(|(id, _)| id.group().is_some_and(|it| is_it(&it))).collect();
        let group = members.first().and_then(|(id, _)| id.group());
        Ok(group.map(|group| (group, members)))
    }

    /// The snapshots of the driver in a pool.
    fn snapshots_of_pool(&mut self, pool: &str) -> CallResult<Vec<(SnapshotId, PoolVolume)>> {
        let volumes = self.api.volumes(pool)?.into_iter().filter(|volume| volume.is_snapshot);
        let of_driver =
            |volume: PoolVolume| Some((SnapshotId::of_pool_name(pool, &volume.name)?, volume));
        Ok(volumes.filter_map(of_driver).collect())
    }

    fn snapshot_entry(&self, id: &SnapshotId, found: &PoolVolume) -> SnapshotEntry {
        let snapshot = Snapshot {
            size_bytes: message_size(found.size_bytes),
            snapshot_id: id.to_string(),
            source_volume_id: id.source().to_string(),
            creation_time: Some(timestamp(id.seconds)),
            ready_to_use: true,
            group_snapshot_id: id.group().map(|group| group.to_string()).unwrap_or_default(),
            accessible_topology: self.accessible_topology(),
        };
        SnapshotEntry { snapshot: Some(snapshot) }
    }

    fn group_response(
        &self,
        group: &GroupId,
        members: &[(SnapshotId, PoolVolume)],
    ) -> VolumeGroupSnapshotResponse {
        let entries = members.iter().map(|(id, found)| self.snapshot_entry(id, found));
        let group_snapshot = VolumeGroupSnapshot {
            group_snapshot_id: group.to_string(),
            snapshots: entries.filter_map(|entry| entry.snapshot).collect(),
            creation_time: Some(timestamp(group.seconds)),
            ready_to_use: true,
        };
        VolumeGroupSnapshotResponse { group_snapshot: Some(group_snapshot) }
    }
}

fn timestamp(seconds: u64) -> Timestamp {
    Timestamp { seconds: i64::try_from(seconds).unwrap_or(i64::MAX) }
}
