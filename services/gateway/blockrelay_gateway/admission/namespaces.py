"""Names of tenants' sessions and KV pages in Redis: no tenant finds those of another. Pure."""

from dataclasses import replace

from blockrelay.auth.api_keys import Tenant
from blockrelay_gateway.admission.admission_request import AdmissionRequest


def scoped_session(tenant: str, session: str) -> str:
    """The session's name in Redis. Names that clients give have no slash."""
    return f"{tenant}/{session}" if tenant else session


def scoped_salt(tenant: str, salt: str) -> str:
    """The salt of page names. Salts that clients give have no NUL."""
    return f"{tenant}\0{salt}" if tenant else salt


def scoped(request: AdmissionRequest, tenant: Tenant) -> AdmissionRequest:
    """`request` in the tenant's own name space."""
    body = replace(request.body, salt=scoped_salt(tenant.name, request.body.salt))
    session = request.session
    if session is not None:
        session = replace(session, session=scoped_session(tenant.name, session.session))
    return replace(request, body=body, session=session)
