//! Volumes: create, delete, expand, modify, list.

use super::{Controller, ListPage, message_size, page_of};
use crate::capabilities::Access;
use crate::messages::{
    CapacityRange, ConfirmedCapabilities, ControllerExpandVolumeRequest,
    ControllerExpandVolumeResponse, ControllerModifyVolumeRequest, CreateVolumeRequest,
    CreateVolumeResponse, GetCapacityRequest, GetCapacityResponse, HealthEntry, HealthError,
    ListRequest, ListVolumeHealthResponse, ListVolumesResponse, SourceId,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, Volume,
    VolumeContentSource, VolumeEntry, VolumeHealth, VolumeHealthResponse, VolumeStatus,
};
use crate::names::{SnapshotId, VolumeId};
use crate::parameters::{VolumeParameters, parse_limits};
use crate::status::{CallResult, Code, Status, check_present};
use crate::storage_api::{Host, NewVolume, Pool, PoolVolume, StorageApi};

/// Size of a volume that is requested without one.
const SIZE_DEFAULT: u64 = 1 << 30;
/// Sizes are multiples of this.
const SIZE_UNIT: u64 = 1 << 20;

/// Source of a new volume.
struct CloneSource {
    pool: Pool,
    volume: PoolVolume,
}

/// Sizes that a request permits.
#[derive(Clone, Copy)]
struct SizeRange {
    required: u64,
    limit: u64,
}

impl<A: StorageApi> Controller<'_, A> {
    pub(crate) fn create_volume(
        &mut self,
        request: &CreateVolumeRequest,
    ) -> CallResult<CreateVolumeResponse> {
        check_present("name", &request.name)?;
        Access::parse_all(&request.volume_capabilities)?;
        let parameters = VolumeParameters::parse(&request.parameters)?;
        let limits = parse_limits(&request.mutable_parameters)?;
        self.check_topology(request.accessibility_requirements.as_ref())?;
        let range = SizeRange::parse(request.capacity_range)?;
        let wanted = parameters.pool.as_deref();
        let source = match &request.volume_content_source {
            Some(source) => Some(self.find_source(source, wanted)?),
            None => None,
        };
        let pool = match &source {
            Some(source) => source.pool.clone(),
            None => self.find_pool(wanted)?,
        };
        let size = range.size_of_new(source.as_ref().map(|source| source.volume.size_bytes))?;
        let id = VolumeId::new(&pool.uuid, &request.name);
        let volumes = self.api.volumes(&pool.uuid)?;
        let before = volumes.into_iter().find(|volume| volume.name == id.pool_name());
        let mut found_bytes = match before {
            Some(before) => {
                self.check_same_volume(&id, &before, source.as_ref(), range)?;
                before.size_bytes
            }
            None => self.make_volume(&id, &pool, &parameters, source.as_ref(), size)?,
        };
        // A clone has the size of its source at first.
        if found_bytes < size && source.is_some() && !self.is_exported(&id)? {
            self.api.resize_volume(&pool.uuid, &id.pool_name(), size)?;
            found_bytes = size;
        }
        self.export_volume(&id, &pool)?;
        if !limits.is_empty() {
            self.api.set_limits(&id.nqn(), &limits)?;
        }
        let volume = Volume {
            capacity_bytes: message_size(found_bytes),
            volume_id: id.to_string(),
            content_source: request.volume_content_source.clone(),
            accessible_topology: self.accessible_topology(),
        };
        Ok(CreateVolumeResponse { volume: Some(volume) })
    }

    /// The volume or snapshot that a new volume is to be a clone of.
    fn find_source(
        &mut self,
        source: &VolumeContentSource,
        wanted_pool: Option<&str>,
    ) -> CallResult<CloneSource> {
        let (text, place) = match source {
            VolumeContentSource { snapshot: Some(SourceId { id }), .. } => {
                (id, SnapshotId::parse(id).map(|id| (id.pool.clone(), id.pool_name())))
            }
            VolumeContentSource { volume: Some(SourceId { id }), .. } => {
                (id, VolumeId::parse(id).map(|id| (id.pool.clone(), id.pool_name())))
            }
            _ => {
                let text = "volume_content_source: empty, expected a snapshot or a volume";
                return Err(Status::invalid_argument(text));
            }
        };
        let none = || Status::not_found(format!("volume_content_source: `{text}` does not exist"));
        let (uuid, name) = place.ok_or_else(none)?;
        let pool = self.open_pool(&uuid)?;
        let is_it = |volume: &PoolVolume| volume.name == name;
        let volume = self.api.volumes(&uuid)?.into_iter().find(is_it).ok_or_else(none)?;
        if wanted_pool.is_some_and(|wanted| wanted != pool.name && wanted != pool.uuid) {
            let text = format!(
                "parameter pool: {}, expected {}, the pool of the source",
                wanted_pool.unwrap_or_default(),
                pool.name
            );
            return Err(Status::invalid_argument(text));
        }
        Ok(CloneSource { pool, volume })
    }

    /// Creates the volume in its pool, and returns its size.
    fn make_volume(
        &mut self,
        id: &VolumeId,
        pool: &Pool,
        parameters: &VolumeParameters,
        source: Option<&CloneSource>,
        size_bytes: u64,
    ) -> CallResult<u64> {
        let name = id.pool_name();
        if let Some(source) = source {
            self.api.clone_volume(&pool.uuid, &source.volume.name, &name)?;
            return Ok(source.volume.size_bytes);
        }
        let VolumeParameters { is_thick, has_checksums, .. } = *parameters;
        if is_thick && size_bytes > pool.free_bytes {
            let text = format!(
                "volume {id}: {size_bytes} bytes, but pool {} has {} free",
                pool.name, pool.free_bytes
            );
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        let new = NewVolume { name, size_bytes, is_thick, has_checksums };
        self.api.create_volume(&pool.uuid, &new)?;
        Ok(size_bytes)
    }

    /// Refuses an existing volume that is not what the request asks for.
    fn check_same_volume(
        &mut self,
        id: &VolumeId,
        found: &PoolVolume,
        source: Option<&CloneSource>,
        range: SizeRange,
    ) -> CallResult<()> {
        let refuse = |why: String| Err(Status::already_exists(format!("volume {id}: {why}")));
        let origin = source.map(|source| source.volume.name.as_str());
        if found.is_snapshot || found.origin.as_deref() != origin {
            let name = |origin: Option<&str>| origin.unwrap_or("nothing").to_owned();
            let (found, expected) = (name(found.origin.as_deref()), name(origin));
            return refuse(format!("created from {found}, expected from {expected}"));
        }
        let is_complete = self.is_exported(id)?;
        if !is_complete && source.is_none() && found.used_bytes > 0 {
            return refuse(
                "has data and is not exported: left by a deletion that did not end, or by a server that lost its \
                 configuration; expected none of this name"
                    .to_owned(),
            );
        }
        let size = found.size_bytes;
        let may_grow = source.is_some() && !is_complete;
        if (size < range.required && !may_grow) || size > range.limit {
            let SizeRange { required, limit } = range;
            return refuse(format!("{size} bytes, expected {required} to {limit}"));
        }
        Ok(())
    }

    pub(crate) fn delete_volume(&mut self, text: &str) -> CallResult<()> {
        check_present("volume_id", text)?;
        let Some(id) = VolumeId::parse(text) else { return Ok(()) };
        let nqn = id.nqn();
        let hosts = self.hosts_of(&nqn)?;
        if !hosts.is_empty() {
            let hosts: Vec<_> = hosts.into_iter().map(|host| host.host).collect();
            let text = format!("volume {id}: published to {}", hosts.join(", "));
            return Err(Status::failed_precondition(text));
        }
        // Both may be gone; the pool too, if this was its last volume.
        if self.api.subsystems()?.iter().any(|subsystem| subsystem.nqn == nqn) {
            self.open_pool(&id.pool)?;
            self.api.delete_subsystem(&nqn)?;
        }
        let Some((pool, _)) = self.find_volume(&id)? else { return Ok(()) };
        self.api.delete_volume(&pool.uuid, &id.pool_name())
    }

    pub(crate) fn expand_volume(
        &mut self,
        request: &ControllerExpandVolumeRequest,
    ) -> CallResult<ControllerExpandVolumeResponse> {
        check_present("volume_id", &request.volume_id)?;
        let Some(range) = request.capacity_range else {
            return Err(Status::invalid_argument("capacity_range: missing"));
        };
        let range = SizeRange::parse(Some(range))?;
        let (id, pool, volume) = self.expect_volume(&request.volume_id)?;
        let is_block = request.volume_capability.as_ref().is_some_and(|it| it.block.is_some());
        let mut size = volume.size_bytes;
        if size < range.required {
            size = range.size_of_new(None)?;
            self.api.resize_volume(&pool.uuid, &id.pool_name(), size)?;
        } else if size > range.limit {
            let text = format!("volume {id}: {size} bytes, expected {} at most", range.limit);
            return Err(Status::new(Code::OutOfRange, text));
        }
        Ok(ControllerExpandVolumeResponse {
            capacity_bytes: message_size(size),
            node_expansion_required: !is_block,
        })
    }

    pub(crate) fn modify_volume(
        &mut self,
        request: &ControllerModifyVolumeRequest,
    ) -> CallResult<()> {
        check_present("volume_id", &request.volume_id)?;
        let limits = parse_limits(&request.mutable_parameters)?;
        let (id, pool, _) = self.expect_volume(&request.volume_id)?;
        self.export_volume(&id, &pool)?;
        match limits.is_empty() {
            true => Ok(()),
            false => self.api.set_limits(&id.nqn(), &limits),
        }
    }

    pub(crate) fn validate_capabilities(
        &mut self,
        request: ValidateVolumeCapabilitiesRequest,
    ) -> CallResult<ValidateVolumeCapabilitiesResponse> {
        check_present("volume_id", &request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(Status::invalid_argument("volume_capabilities: missing"));
        }
        self.expect_volume(&request.volume_id)?;
        let checked = Access::parse_all(&request.volume_capabilities)
            .and_then(|_| VolumeParameters::parse(&request.parameters))
            .and_then(|_| parse_limits(&request.mutable_parameters));
        let (confirmed, message) = match checked {
            Ok(_) => {
                let ValidateVolumeCapabilitiesRequest {
                    volume_context,
                    volume_capabilities,
                    parameters,
                    mutable_parameters,
                    ..
                } = request;
                let confirmed = ConfirmedCapabilities {
                    volume_context,
                    volume_capabilities,
                    parameters,
                    mutable_parameters,
                };
                (Some(confirmed), String::new())
            }
            Err(status) => (None, status.message),
        };
        Ok(ValidateVolumeCapabilitiesResponse { confirmed, message })
    }

    pub(crate) fn list_volumes(
        &mut self,
        request: &ListRequest,
    ) -> CallResult<ListVolumesResponse> {
        let hosts = self.api.hosts()?;
        let mut all = Vec::new();
        for pool in self.api.pools()? {
            for (id, volume) in self.volumes_of_pool(&pool.uuid)? {
                all.push((id.to_string(), self.volume_entry(&id, &volume, &hosts)));
            }
        }
        let is_id = |token: &str| VolumeId::parse(token).is_some();
        let ListPage { entries, next_token } =
            page_of(all, (&request.starting_token, request.max_entries), is_id)?;
        Ok(ListVolumesResponse { entries, next_token })
    }

    pub(crate) fn get_volume(&mut self, text: &str) -> CallResult<VolumeEntry> {
        check_present("volume_id", text)?;
        let (id, _, volume) = self.expect_volume(text)?;
        let hosts = self.api.hosts()?;
        Ok(self.volume_entry(&id, &volume, &hosts))
    }

    pub(crate) fn get_capacity(
        &mut self,
        request: &GetCapacityRequest,
    ) -> CallResult<GetCapacityResponse> {
        let parameters = VolumeParameters::parse(&request.parameters)?;
        let is_fit = request.volume_capabilities.iter().all(|one| Access::parse(one).is_ok());
        let is_near =
            request.accessible_topology.as_ref().is_none_or(|it| self.is_reached_from(it));
        if !is_fit || !is_near {
            return Ok(GetCapacityResponse { available_capacity: 0 });
        }
        let pools = match parameters.pool.as_deref() {
            Some(name) => vec![self.find_pool(Some(name))?],
            None => self.api.pools()?,
        };
        let free = pools.iter().map(|pool| pool.free_bytes).sum();
        Ok(GetCapacityResponse { available_capacity: message_size(free) })
    }

    pub(crate) fn volume_health(&mut self, text: &str) -> CallResult<VolumeHealthResponse> {
        check_present("volume_id", text)?;
        let (id, pool, _) = self.expect_volume(text)?;
        Ok(VolumeHealthResponse { volume_health: Some(health_of(&id, &pool)) })
    }

    pub(crate) fn list_volume_health(
        &mut self,
        request: &ListRequest,
    ) -> CallResult<ListVolumeHealthResponse> {
        let mut all = Vec::new();
        for pool in self.api.pools()? {
            for (id, _) in self.volumes_of_pool(&pool.uuid)? {
                all.push((id.to_string(), health_of(&id, &pool)));
            }
        }
        let is_id = |token: &str| VolumeId::parse(token).is_some();
        let ListPage { entries, next_token } =
            page_of(all, (&request.starting_token, request.max_entries), is_id)?;
        Ok(ListVolumeHealthResponse { entries, next_token })
    }

    /// The volumes of the driver in a pool.
    fn volumes_of_pool(&mut self, pool: &str) -> CallResult<Vec<(VolumeId, PoolVolume)>> {
        let volumes = self.api.volumes(pool)?.into_iter().filter(|volume| !volume.is_snapshot);
        let of_driver =
            |volume: PoolVolume| Some((VolumeId::of_pool_name(pool, &volume.name)?, volume));
        Ok(volumes.filter_map(of_driver).collect())
    }

    fn volume_entry(&self, id: &VolumeId, volume: &PoolVolume, hosts: &[Host]) -> VolumeEntry {
        let nqn = id.nqn();
        let source = |id: String| Some(SourceId { id });
        let content_source = volume.origin.as_ref().and_then(|origin| {
            let snapshot = SnapshotId::of_pool_name(&id.pool, origin);
            let volume = VolumeId::of_pool_name(&id.pool, origin);
            Some(match (snapshot, volume) {
                (Some(id), _) => {
                    VolumeContentSource { snapshot: source(id.to_string()), volume: None }
                }
                (None, id) => {
                    VolumeContentSource { snapshot: None, volume: source(id?.to_string()) }
                }
            })
        });
        let published = hosts.iter().filter(|host| host.subsystem == nqn);
        let published_node_ids = published.map(|host| host.host.clone()).collect();
        let volume = Volume {
            capacity_bytes: message_size(volume.size_bytes),
            volume_id: id.to_string(),
            content_source,
            accessible_topology: self.accessible_topology(),
        };
        VolumeEntry { volume: Some(volume), status: Some(VolumeStatus { published_node_ids }) }
    }
}

impl SizeRange {
    fn parse(range: Option<CapacityRange>) -> CallResult<Self> {
        let CapacityRange { required_bytes, limit_bytes } = range.unwrap_or_default();
        let parse = |field: &str, bytes: i64| {
            u64::try_from(bytes).map_err(|_| {
                Status::invalid_argument(format!("capacity_range.{field}: {bytes}, expected >= 0"))
            })
        };
        let required = parse("required_bytes", required_bytes)?;
        let limit = match parse("limit_bytes", limit_bytes)? {
            0 => u64::MAX,
            limit => limit,
        };
        if required > limit {
            let text = format!("capacity_range: {required} required, {limit} at most");
            return Err(Status::invalid_argument(text));
        }
        Ok(Self { required, limit })
    }

    /// Size of a new volume, at least that of its source.
    fn size_of_new(self, source: Option<u64>) -> CallResult<u64> {
        let smallest = match (self.required, source) {
            (0, None) => SIZE_DEFAULT.min(self.limit),
            (required, source) => required.max(source.unwrap_or_default()),
        };
        // A clone may keep a size that is no multiple.
        let size = match source {
            Some(size) if size == smallest => size,
            _ => smallest.checked_next_multiple_of(SIZE_UNIT).unwrap_or(u64::MAX),
        };
        if size > self.limit || size > i64::MAX as u64 {
            let text = format!("capacity_range: {size} bytes, expected {} at most", self.limit);
            return Err(Status::new(Code::OutOfRange, text));
        }
        Ok(size)
    }
}

fn health_of(id: &VolumeId, pool: &Pool) -> VolumeHealth {
    let entry = |why: &String| HealthEntry {
        status: HealthError::Inaccessible as i32,
        reason: "PoolStopped".to_owned(),
        message: format!("pool {}: {why}", pool.name),
    };
    let health_statuses = pool.stopped_because.iter().map(entry).collect();
    VolumeHealth { volume_id: id.to_string(), health_statuses }
}
