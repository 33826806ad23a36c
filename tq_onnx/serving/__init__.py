"""Serve a folder to OpenAI's clients: routes, fields, limits, tools, metrics, over ``Engine``.

``protocol`` declares the fields of a request; ``calls`` finds calls of tools in answers; ``limits``
bounds bodies, requests and slow clients. Needs ``tq-onnx[serve]``; only this room imports fastapi,
starlette, pydantic and uvicorn.
"""
